"""One-line bugs that somebody could write, and the tests that must find them: a check of the tests.

`make test-mutations` plants one after another in a copy of the tree. What each of them breaks is
its name; that their places still exist, tests/test_mutations.py looks at in every `make test`.
With --simulation those of the protocol are to be found by seeded runs alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.planted.elsewhere import ELSEWHERE
from tests.planted.mutation import Mutation
from tests.planted.protocol import OF_PROTOCOL

ROOT = Path(__file__).parent.parent
COPIED = ("elastic", "workers", "tests")
TIMEOUT_S = 300
NUM_SEEDS = 2000
BY_SIMULATION = "--simulation"
MUTATIONS = (*OF_PROTOCOL, *ELSEWHERE)


def lacks(mutation: Mutation) -> str:
    """Why it cannot be planted; empty if it can."""
    count = (ROOT / mutation.file).read_text().count(mutation.old)
    if count == 1:
        return ""
    return f"{mutation.file} has {mutation.old!r} {count} times; the mutation needs a new place"


PYTEST = ("pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
SIMULATION = ("tests.control.seeds", "0", str(NUM_SEEDS), "--first")


def plant(mutation: Mutation, tree: Path, *, by_simulation: bool) -> str:
    """Run its tests, or the simulation, in the mutated tree -> "found", or what happened."""
    path = tree / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    arguments = SIMULATION if by_simulation else (*PYTEST, *mutation.tests.split())
    timeout_s = TIMEOUT_S * 4 if by_simulation else TIMEOUT_S
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=timeout_s,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"not found within {timeout_s} s"
    finally:
        path.write_text(before)
    if by_simulation and done.returncode == 1 and done.stdout.startswith("seed "):
        return f"found, {done.stdout.splitlines()[0]}"
    if done.returncode == 1:  # a fixture's look at the device counts; a file that is no test is 2
        return "found"
    return "survived" if done.returncode == 0 else f"no test ran: {done.stdout[-500:]}"


def main() -> int:
    """The status is that of the tests: 0 if all were found."""
    by_simulation = BY_SIMULATION in sys.argv
    wanted = [word for word in sys.argv[1:] if word != BY_SIMULATION]
    chosen = [m for m in MUTATIONS if not wanted or any(word in m.name for word in wanted)]
    if by_simulation and not wanted:
        chosen = [m for m in MUTATIONS if m.is_of_protocol]
    num_missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for mutation in chosen:
            began = time.monotonic()
            outcome = lacks(mutation) or plant(mutation, tree, by_simulation=by_simulation)
            num_missed += not outcome.startswith("found")
            print(f"{time.monotonic() - began:6.1f} s  {mutation.name}: {outcome}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} mutations found")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
