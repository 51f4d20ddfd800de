"""torch's sanitizer of streams over the tests of FSDP and of snapshots; compute-sanitizer's
memcheck over a step."""

import argparse
import os
import re
import shutil
import subprocess
import sys

from tests.gpu.experiment import Table, main

TESTS = ("tests/workers/test_fsdp.py", "tests/workers/test_following.py")
ONE_STEP = "from tests.gpu.one.a8_sanitizers import one_step; one_step()"


def one_step() -> None:
    """Of FSDP2 over one rank, on the GPU."""
    from tests.workers import sharded_rig, where
    from workers.distributed.process_group import Alone

    where.go_to("cuda")
    strategy = sharded_rig.build("fsdp")
    sharded_rig.enter(strategy, Alone(), 0)
    sharded_rig.train(strategy, Alone(), "fsdp", 1)
    print(sharded_rig.sha256(strategy))


def errors_in(text: str) -> int:
    """By memcheck's summary; -1: there is none."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    return int(found[1]) if found else -1


def body(table: Table, arguments: argparse.Namespace) -> None:
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "ELASTIC_TEST_DEVICE": "cuda"}
    pytest = [sys.executable, "-m", "pytest", *TESTS, "-q", "-s"]
    done = subprocess.run(pytest, capture_output=True, text=True, env=environment, check=False)
    text = done.stdout + done.stderr
    table.at_most("torch's sanitizer: data races", text.count("CSAN detected"), 0)
    table.holds("the tests pass under it", done.returncode == 0, f"status {done.returncode}")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        table.tell("memcheck", "no compute-sanitizer here")
        return
    step = [tool, "--tool", "memcheck", sys.executable, "-c", ONE_STEP]
    done = subprocess.run(step, capture_output=True, text=True, check=False)
    table.holds("memcheck: errors of a step", errors_in(done.stdout + done.stderr) == 0,
                str(errors_in(done.stdout + done.stderr)))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(body))
