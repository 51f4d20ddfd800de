"""`make test-gpu`: what this machine's GPUs allow, as a line of the machine and a table of numbers.

Without names: the tests of NCCL, on two GPUs or more and with Ray those of kills, hangs and bits,
and the experiments for one GPU. With names, as `python -m tests.gpu a1 a7 b2`: those alone. Exit
status 2 and the reason where no GPU can be used.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu import experiment, machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NCCL = ("tests/gpu/test_nccl.py",)
CLUSTER = tuple(f"tests/cluster/test_{name}.py" for name in ("bits", "hangs", "random_kills"))
"""Whoever needs more workers than there are GPUs is skipped there (tests/cluster/live.py)."""
WITH_RAY = 2
"""GPUs, for the tests of whole runs."""


def experiments() -> dict[str, str]:
    """Name, as "a1" -> module."""
    found = sorted(HERE.glob("*/[abc][0-9]*.py"), key=lambda p: order(p.stem))
    return {p.stem.partition("_")[0]: f"tests.gpu.{p.parent.name}.{p.stem}" for p in found}


def order(stem: str) -> tuple[str, int]:
    name = stem.partition("_")[0]
    return name[0], int(name[1:])


def run_tests(files: tuple[str, ...], **environment: str) -> bool:
    command = [sys.executable, "-m", "pytest", *files, "-q", "-m", "not slow or gpu"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode == 0


def run_experiment(name: str, module: str) -> tuple[int, list[str]]:
    """Its exit status, and its rows as it has printed them."""
    command = [sys.executable, "-m", module, "--record"]
    print(f"\n{name}: {module}", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    rows = list[str]()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith(("PASS ", "FAIL ", "TELL ")):
            rows.append(f"{name} {line.strip()}")
    return process.wait(60), rows


def main() -> int:
    known = experiments()
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {' '.join(known)}")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"there is no {' '.join(unknown)}; there are {' '.join(known)}")
    if why := machine.refusal():
        print(f"test-gpu: {why}", file=sys.stderr)
        return 2
    print(machine.line(), flush=True)
    is_good, table = True, list[str]()
    if not arguments.names:
        is_good = run_tests(NCCL)
        if torch.cuda.device_count() >= WITH_RAY and machine.has_ray():
            is_good &= run_tests(CLUSTER, ELASTIC_TEST_DEVICE="cuda")
    for name in arguments.names or [n for n in known if n.startswith("a")]:
        status, rows = run_experiment(name, known[name])
        is_good &= status == 0
        table += rows or [f"{name} ended with status {status}"]
    print("\n" + machine.line(), *table, f"rows are in {experiment.RESULTS}", sep="\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
