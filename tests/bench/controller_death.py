"""SIGKILL of the controller of a running job: until its successor has adopted the workers, and the
longest gap between two commits meanwhile, against a median step.

    python -m tests.bench.controller_death --kills 9
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import time

from tests.bench.harness import (
    console,
    elastic_run,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.join import times_of

WORKERS = 4
STEPS_BETWEEN = 25


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=9)
    arguments = parser.parse_args()
    about = machine(WORKERS)
    console.print(about)
    killed: list[float] = []
    options = {"workers": WORKERS, "steps": 100_000, "global_batch": 64, "micro_batch": 8}
    with storage_directory() as storage, elastic_run(storage, "run", **options) as run:
        status = run.wait_until(lambda s: s["step"] >= STEPS_BETWEEN, timeout_s=300)
        for _ in range(arguments.kills):
            pid, step = status["controller"]["pid"], status["step"]
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)
            status = run.wait_until(
                lambda s, p=pid, n=step: (
                    s["controller"]["pid"] != p and s["step"] > n + STEPS_BETWEEN
                ),
                timeout_s=120,
            )
        adopted = times_of(run.directory / "journal.jsonl", "Adopted")
        lines = run.metrics()
    assert status["generation"] == 1, "the members were disturbed"
    assert [m["step"] for m in lines] == list(range(1, len(lines) + 1)), "a step is missing"
    took = [a - k for k, a in zip(killed, adopted, strict=True)]
    console.print([round(t, 2) for t in took])
    times = [m["time"] for m in lines if m["step"] > STEPS_BETWEEN]
    steps_s = sorted(b - a for a, b in itertools.pairwise(times))
    usual_s = statistics.median(steps_s)
    results = {
        "adopted after": f"{statistics.median(took):.2f} s, worst {max(took):.2f}",
        "longest gap": f"{steps_s[-1] - usual_s:.3f} s above the median step of {usual_s:.3f} s",
        "lost steps": "0",
    }
    report("Death of the controller", list(results), [list(results.values())])
    setting = f"{arguments.kills} kills, {WORKERS} workers, default char-LM"
    record("controller death", about=about, setting=setting, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
