"""Runs over a bad network from the command line: which seeds break something, and what.

python -m tests.control.seeds 0 20000           # all kinds of state, all seeds
python -m tests.control.seeds 0 2000 --first    # until one breaks something
"""

import argparse
import sys
import time
import traceback

from tests.control.fake_cluster import FakeCluster
from tests.control.sharded_cluster import ShardedCluster, StagesCluster
from tests.control.test_network_simulation import run_seed

KINDS: dict[str, type[FakeCluster]] = {
    "whole": FakeCluster,
    "parts": ShardedCluster,
    "stages": StagesCluster,
}
SAID_EVERY = 1000


def violation(kind: str, seed: int) -> str:
    """What the run has broken; empty: nothing."""
    try:
        run_seed(KINDS[kind], seed)
    except Exception as error:  # an assertion, an invariant of a machine, an unexpected event
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = str(error).partition("\n")[0][:200]
        return f"{type(error).__name__} in {where.name}: {what}"
    return ""


def main() -> int:
    """1 if a seed has broken something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("begin", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--first", action="store_true", help="stop at the first violation")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    wanted = parser.parse_args()
    began, num_found = time.monotonic(), 0
    for seed in range(wanted.begin, wanted.end):
        for kind in wanted.kinds:
            if why := violation(kind, seed):
                num_found += 1
                print(f"seed {seed} {kind}: {why}", flush=True)
        if num_found and wanted.first:
            return 1
        if (seed + 1) % SAID_EVERY == 0:
            print(f"{seed + 1} seeds, {time.monotonic() - began:.0f} s", flush=True)
    num_runs = (wanted.end - wanted.begin) * len(wanted.kinds)
    print(f"{num_runs} runs, {num_found} violations, {time.monotonic() - began:.0f} s")
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
