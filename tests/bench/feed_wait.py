"""The share of a training step that is spent waiting for data, of the shipped char-LM on Parquet.

    python -m tests.bench.feed_wait [--steps 200] [--runs 3]

The wait is taken around each `next()` of step.microbatches(), so it holds a little of our own work,
too. What the feed adds to a recovery is feed_regroup.py's.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import elastic
from tests.bench.harness import (
    ONE_THREAD,
    lines_of,
    machine,
    record,
    report,
    storage_directory,
)
from workers.workloads.parquet import ParquetCharLM

WORKERS, GLOBAL_BATCH, MICRO_BATCH = 2, 64, 8
WARM_STEPS = 20


def timed(session: Any) -> None:
    """The stock loop with a clock around each wait for a micro-batch."""
    while session.step < session.steps:
        with session.next_step() as step:
            batches, waited_s = step.microbatches(), 0.0
            while True:
                asked_at = time.perf_counter()
                batch = next(batches, None)
                waited_s += time.perf_counter() - asked_at
                if batch is None:
                    break
                step.backward(session.workload.loss(session.model, batch))
            session.log(waited_s=waited_s)
            step.commit()


def wait_share(storage: Path, steps: int) -> float:
    """Median over steps of the seconds waited, by the step's seconds; in percent."""
    elastic.run(
        ParquetCharLM(folder=str(storage / "text")),
        loop=timed,
        workers=WORKERS,
        steps=steps,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        storage=str(storage),
        name=f"wait-{time.monotonic_ns()}",
    )
    newest = max(storage.glob("wait-*"), key=lambda place: place.stat().st_mtime)
    lines = lines_of(newest / "metrics.jsonl")[WARM_STEPS:]
    return 100 * statistics.median(line["user"]["waited_s"] / line["step_s"] for line in lines)


def main(steps: int, runs: int) -> None:
    os.environ |= ONE_THREAD
    about = machine(WORKERS)
    with storage_directory() as storage:
        shares = [wait_share(storage, steps) for _ in range(runs)]
    results = {"waiting for data": f"{statistics.median(shares):.2f} % of a step"}
    report("Feed in a run", ("measure", "median"), list(results.items()))
    setting = f"char-LM on {WORKERS} workers, {steps} steps, median of {runs} runs' medians"
    record("feed_wait", about=about, setting=setting, results=results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    main(options.steps, options.runs)
