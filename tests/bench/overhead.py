"""What a step costs beside its computation: a trivial model, against plain DDP under torchrun.

One thread and one micro-batch per rank; alternating pairs. At W = 1 there is nothing to reduce.
    python -m tests.bench.overhead --pairs 5
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import count, pairwise
from pathlib import Path

from tests.bench.harness import (
    REPOSITORY,
    alternating,
    console,
    elastic_run,
    environment,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.torchrun_ddp import WARMUP_STEPS

TRIVIAL = "tests.bench.trivial:Trivial"


def torchrun_ms(world: int, steps: int) -> float:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", str(world)]
    command += ["-m", "tests.bench.torchrun_ddp", "--target", TRIVIAL, "--steps", str(steps)]
    command += ["--global-batch", str(world), "--micro-batch", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"torchrun failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms_per_step"]


def elastic_ms(storage: Path, name: str, world: int, reduction: str, steps: int) -> float:
    """Median time from commit to commit."""
    options = {"global_batch": world, "micro_batch": 1, "clip_norm": 1.0, "reduction": reduction}
    with elastic_run(storage, name, target=TRIVIAL, workers=world, steps=steps, **options) as run:
        run.finish(600)
        lines = run.metrics()[WARMUP_STEPS:]
    return 1000 * statistics.median(b["time"] - a["time"] for a, b in pairwise(lines))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    about = machine(2)
    console.print(about)
    results: dict[str, str] = {}
    names, steps = map(str, count()), arguments.steps
    with storage_directory() as storage:
        for world in (1, 2):
            for reduction in ("fast", "bitwise"):
                ours, theirs = alternating(
                    arguments.pairs,
                    lambda w=world, r=reduction: elastic_ms(storage, next(names), w, r, steps),
                    lambda w=world: torchrun_ms(w, steps),
                )
                us, them = statistics.median(ours), statistics.median(theirs)
                results[f"{reduction}, W = {world}"] = (
                    f"{us - them:+.2f} ms per step ({us:.2f} against {them:.2f})"
                )
    report("A step of a trivial model", list(results), [list(results.values())])
    record("overhead", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
