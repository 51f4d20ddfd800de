"""What the feed costs a training run: the share of a step spent waiting for data, and the part of a
recovery that it adds.

    python -m tests.bench.feed_wait [--steps 200] [--pairs 9]

The wait is taken around each `next()` of step.microbatches(), so it holds a little of our own work,
too. A recovery with Parquet (`FedDigits`) is compared with one without (`Digits`).
"""

import argparse
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import elastic
from tests.bench.harness import (
    ONE_THREAD,
    alternating,
    console,
    elastic_run,
    lines_of,
    machine,
    record,
    report,
    storage_directory,
)
from workers.workloads.fed import FedCharLM

WORKERS, GLOBAL_BATCH, MICRO_BATCH = 2, 64, 8
KILL_WORKERS = 4
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
        FedCharLM(folder=str(storage / "text")),
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


def recovery_s(storage: Path, target: str) -> float:
    """Seconds from the last sign of life of one of four workers to the next committed step."""
    options = {"workers": KILL_WORKERS, "standby": 1, "steps": 2000, "set_": {}}
    if target.endswith("FedDigits"):
        options["set_"] = {"folder": repr(str(storage / "digits"))}
    name = f"kill-{time.monotonic_ns()}"
    batch = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
    with elastic_run(storage, name, target=target, **options, **batch) as run:
        status = run.wait_until(
            lambda s: s["world_size"] == KILL_WORKERS and s["step"] > WARM_STEPS, 180
        )
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
        after = run.wait_until(
            lambda s: s["generation"] > status["generation"] and s["phase"] == "running", 60
        )
        run.wait_until(lambda s: s["step"] > after["step"] + 5, 60)
        os.kill(run.process.pid, signal.SIGTERM)
        run.process.wait(60)
        return run.result()["recoveries"][0]["total_s"]


def main(steps: int, pairs: int) -> None:
    os.environ |= ONE_THREAD
    about = machine(KILL_WORKERS)
    with storage_directory() as storage:
        shares = [wait_share(storage, steps) for _ in range(min(pairs, 3))]
        fed, plain = alternating(
            pairs,
            lambda: recovery_s(storage, "workers.workloads.fed:FedDigits"),
            lambda: recovery_s(storage, "workers.workloads.digits:Digits"),
        )
    extra = statistics.median(fed) - statistics.median(plain)
    results = {
        "waiting for data": f"{statistics.median(shares):.2f} % of a step",
        "recovery fed": f"{1e3 * statistics.median(fed):.0f} ms",
        "recovery map-style": f"{1e3 * statistics.median(plain):.0f} ms",
        "added by the feed": f"{1e3 * extra:.0f} ms",
    }
    report("Feed in a run", ("measure", "median"), list(results.items()))
    setting = f"char-LM on {WORKERS} workers, digits on {KILL_WORKERS}, medians of {pairs}"
    record("feed_wait", about=about, setting=setting, results=results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    console.print(f"{options.steps} steps, {options.pairs} pairs")
    main(options.steps, options.pairs)
