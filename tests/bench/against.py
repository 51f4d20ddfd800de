"""This tree against another commit, in alternating pairs: start, step, recovery, bits.

The commit is checked out into a temporary directory and runs with the libraries of this
environment. A ratio is ours by theirs, the median over pairs: above 1 is slower. Runs of both trees
must end with the same weights, fault or not.
    python -m tests.bench.against f1baa5e --pairs 5
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from tests.bench.harness import (
    REPOSITORY,
    console,
    elastic_run,
    machine,
    percentile,
    record,
    report,
    storage_directory,
)
from tests.bench.recovery import WARM_STEPS, WORKERS, kills_of_a_run

CALM = {
    "ddp bitwise": {"parallel": "ddp", "reduction": "bitwise"},
    "ddp fast": {"parallel": "ddp", "reduction": "fast"},
    "fsdp bitwise": {"parallel": "fsdp", "reduction": "bitwise"},
}
JOB = {"workers": 2, "steps": 80, "global_batch": 32, "micro_batch": 8, "seed": 0}
STEPS_UNDER_FIRE, KILLS = 160, 5


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ea-", ignore_cleanup_errors=True) as directory:
        tree = Path(directory) / "tree"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def calm(storage: Path, tree: Path, name: str, options: dict[str, str]) -> dict[str, float | str]:
    """Seconds to the first step and from a commit to the next one (median), and the weights' hash,
    undisturbed. A commit's time means the same in all versions, `step_s` does not."""
    with elastic_run(storage, name, tree=tree, **JOB, **options) as run:
        result = run.finish(600)
        lines = run.metrics()
    times = [line["time"] for line in lines[WARM_STEPS:]]
    return {
        "start": lines[0]["time"] - run.begun_at,
        "step": statistics.median(after - before for before, after in pairwise(times)),
        "hash": result["weights_sha256"],
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    about = machine(WORKERS)
    console.print(about)
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    recoveries: dict[str, list[float]] = {"ours": [], "theirs": []}
    hashes: defaultdict[str, set[object]] = defaultdict(set)
    lost = 0
    with checkout(arguments.commit) as other, storage_directory() as storage:
        for whose in recoveries:
            (storage / whose).mkdir()
        for pair in range(arguments.pairs):
            trees = [("ours", REPOSITORY), ("theirs", other)]
            if pair % 2:
                trees.reverse()
            for words, options in CALM.items():
                found = {
                    whose: calm(storage, tree, f"{words.replace(' ', '-')}-{whose}-{pair}", options)
                    for whose, tree in trees
                }
                for figure in ("start", "step"):
                    ratio = float(found["ours"][figure]) / float(found["theirs"][figure])
                    ratios[f"{words}, {figure}"].append(ratio)
                hashes[words] |= {one["hash"] for one in found.values()}
            for whose, tree in trees:
                seconds, end = kills_of_a_run(
                    storage / whose, pair, STEPS_UNDER_FIRE, KILLS, random.Random(pair), tree=tree
                )
                recoveries[whose] += seconds
                hashes["kills"].add(end["sha"])
                lost += end["lost_steps"]
            console.print({name: [round(r, 3) for r in each] for name, each in ratios.items()})
    results = {name: f"{statistics.median(each):.3f}" for name, each in ratios.items()}
    for whose, seconds in recoveries.items():
        results[f"recovery {whose}"] = (
            f"p50 {percentile(seconds, 50):.3f} s, worst {max(seconds):.3f} s"
        )
    equal = sum(len(each) == 1 for each in hashes.values())
    results["equal hashes"] = f"{equal}/{len(hashes)}"
    results["lost steps"] = str(lost)
    report(f"Against {arguments.commit}", list(results), [list(results.values())])
    record("against", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0 if equal == len(hashes) and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
