"""A fault every 29 s for 10 minutes against the same steps without faults: committed steps per
second, and where the time went.

    python -m tests.bench.goodput [--minutes 10] [--every 29] [--faults kill,term]

4 workers, one standby, synchronous, bitwise; a step is 0.2 to 0.4 s, of which at least 70 % is a
fixed sleep, so that the machine's cores are not what is measured. The calm run goes half its way
before the other one and half after it: a machine's speed drifts by as much as faults cost.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path

from elastic.chaos.report import read_story
from elastic.chaos.report import report as report_of
from elastic.store.files import open_folder
from tests.bench.harness import console, machine, record, report, storage_directory
from tests.cluster.live import JOBS, LiveRun

WORKERS, NUM_MICROBATCHES = 4, 8
SLEEP_S = 0.11
"""Per micro-batch; two of them in a step of all workers."""
STEP_S = 0.25
"""About, for the number of steps."""
WARM_STEPS = 20
NUMBERS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
OPTIONS = {
    "workers": f"2..{WORKERS}",
    "standby": 1,
    "max_failures": 99,
    "global_batch": 6 * NUM_MICROBATCHES,
    "micro_batch": 6,
    "set": [f"sleep={SLEEP_S}"],
}


def is_full(status: dict) -> bool:
    warm = [w for w in status["standby"] if w["state"] == "standby"]
    return status["world_size"] == WORKERS and bool(warm) and status["step"] > 5


def calm_run(storage: Path, temp: Path, steps: int) -> tuple[dict, LiveRun]:
    """To `steps`, from where it has ended before."""
    with LiveRun(TOY, storage, "calm", temp, steps=steps, **OPTIONS) as run:
        return run.finish(steps)["result"], run


def faulty_run(
    storage: Path, temp: Path, steps: int, every_s: float, faults: list[str], dice: random.Random
) -> tuple[dict, LiveRun, list[float]]:
    struck: list[float] = []
    with LiveRun(TOY, storage, "faulty", temp, steps=steps, **OPTIONS) as run:
        run.wait_for(is_full, 300)
        began = time.monotonic()
        while run.process.poll() is None:
            next_at = began + every_s * (len(struck) + 0.5)
            members = run.status()["workers"]  # none at the very end
            if time.monotonic() < next_at or not members:
                time.sleep(0.05)  # until the next fault is due
                continue
            struck.append(time.time())
            os.kill(dice.choice(members)["pid"], NUMBERS[dice.choice(faults)])
        return run.finish(100)["result"], run, struck


def full_steps(lines: list[dict]) -> tuple[int, float]:
    """Committed steps, and their seconds, from the first full and warm one on."""
    first = next(i for i, m in enumerate(lines) if m["world_size"] == WORKERS) + WARM_STEPS
    return len(lines) - 1 - first, lines[-1]["time"] - lines[first]["time"]


TOY = f"{JOBS / 'toy.py'}:Toy"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=29)
    parser.add_argument("--faults", default="kill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faults = arguments.faults.split(",")
    about = machine(WORKERS)
    console.print(about)
    with storage_directory() as storage, storage_directory() as temp:
        half = round(60 * arguments.minutes / STEP_S / 2)
        calm_run(storage, temp, half)
        dice = random.Random(arguments.seed)
        run_of = faulty_run(storage, temp, 2 * half, arguments.every, faults, dice)
        result, faulty_at, struck = run_of
        calm, calm_at = calm_run(storage, temp, 2 * half)
        lines = calm_at.lines("metrics.jsonl")
        halves = full_steps(lines[:half]), full_steps(lines[half:])
        calm_rate = sum(steps for steps, _ in halves) / sum(seconds for _, seconds in halves)
        drift = (halves[1][0] / halves[1][1]) / (halves[0][0] / halves[0][1])
        steps, seconds = full_steps(faulty_at.lines("metrics.jsonl"))
        rate, step_s = steps / seconds, statistics.median(m["step_s"] for m in lines)
        goodput = report_of(read_story(open_folder(str(faulty_at.directory))))["goodput"]
    sleep_s = SLEEP_S * NUM_MICROBATCHES / WORKERS
    is_equal = calm["weights_sha256"] == result["weights_sha256"]
    results = {
        "steps per second": f"{rate:.3f} against {calm_rate:.3f} without faults",
        "calm after against before": f"{drift:.3f}",
        "ratio": f"{rate / calm_rate:.4f}",
        "equal hash": "yes" if is_equal else "NO",
        "lost steps": str(result["lost_steps"]),
        "goodput": f"{goodput['time']:.4f} of the time, {goodput['capacity']:.4f} of the capacity",
        "median step": f"{step_s:.3f} s, {sleep_s / step_s:.0%} of it fixed sleep",
    }
    report(f"{len(struck)} faults", list(results), [list(results.values())])
    setting = (
        f"{arguments.faults} every {arguments.every:g} s, {arguments.minutes:g} min, {WORKERS} "
        "workers, standby 1, bitwise"
    )
    record("goodput", about=about, setting=setting, results=results)
    return 0 if is_equal and result["lost_steps"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
