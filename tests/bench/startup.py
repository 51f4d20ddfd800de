"""From `elastic run` to the first committed step, against Ray Train from `ray.init` and `fit()`.

Ours is counted from the start of the process to the time of step 1 in metrics.jsonl, imports and
the embedded Ray included; the peer twice: from its own process start, and from fit() alone.
    python -m tests.bench.startup --pairs 9
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import count
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

WORKERS = 2
STEPS = 5


def ours_s(storage: Path, name: str) -> float:
    options = {"workers": WORKERS, "steps": STEPS, "global_batch": 64, "micro_batch": 8}
    with elastic_run(storage, name, **options) as run:
        run.finish(300)
        return run.metrics()[0]["time"] - run.begun_at


def peer_s(fit_only: list[float]) -> float:
    command = [sys.executable, "-m", "tests.bench.ray_train", "--workers", str(WORKERS)]
    begun_at = time.time()
    done = subprocess.run(
        [*command, "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=REPOSITORY,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"the peer failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    fit_only.append(found["first_step_s"])
    return found["first_step_at"] - begun_at


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    about = machine(WORKERS)
    console.print(about)
    numbers, fit_only = count(), []
    with storage_directory() as storage:
        ours, theirs = alternating(
            arguments.pairs,
            lambda: ours_s(storage, f"start-{next(numbers)}"),
            lambda: peer_s(fit_only),
        )
    ours_median, fit_median = statistics.median(ours), statistics.median(fit_only)
    results = {
        "elastic run": f"{ours_median:.2f} s",
        "Ray Train, process": f"{statistics.median(theirs):.2f} s",
        "Ray Train, fit() only": f"{fit_median:.2f} s",
        "ours / process": f"{ours_median / statistics.median(theirs):.2f}",
        "ours / fit()": f"{ours_median / fit_median:.2f}",
    }
    report("To the first committed step", list(results), [list(results.values())])
    record("startup", about=about, setting=f"{arguments.pairs} pairs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
