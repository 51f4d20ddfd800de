"""SIGKILL of one of 4 FSDP ranks at random instants: time to the next committed step, and the bits.

About 19 million parameters, nothing is saved to storage. Recovery = time of the controller's first
committed step of a later generation - time of the kill - the median step of the same run with all
4 ranks (of the uninterrupted run: printed beside it). No step may be lost, and all runs must end
with the weights of the uninterrupted one.
    python -m tests.bench.fsdp_recovery --kills 50
"""

import argparse
import os
import random
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.harness import (
    Run,
    console,
    elastic_run,
    lines_of,
    machine,
    record,
    report,
    storage_directory,
)
from tests.bench.recovery import against_peer, summary
from tests.bench.torchrun_fsdp import MODEL

WORKERS = 4
WARM_STEPS = 2
OPTIONS = {
    "global_batch": 16,
    "micro_batch": 2,
    "clip_norm": 1.0,
    "reduction": "bitwise",
    "parallel": "fsdp",
    "max_failures": 99,
}


def commits(run: Run) -> list[dict[str, Any]]:
    """The controller's Committed events: at, generation, step."""
    lines = [line.get("entry", {}) for line in lines_of(run.directory / "journal.jsonl")]
    events = [entry.get("event") or {} for entry in lines]
    return [e for e in events if e.get("type") == "Committed"]


def baseline(storage: Path, steps: int) -> tuple[str, float]:
    """The uninterrupted run: its hash and its median step, from commit to commit."""
    with elastic_run(storage, "calm", workers=WORKERS, steps=steps, set_=MODEL, **OPTIONS) as run:
        result = run.finish(900)
        at = [e["at"] for e in commits(run)[WARM_STEPS:]]
    return result["weights_sha256"], statistics.median(b - a for a, b in pairwise(at))


def kill_at_random(run: Run, dice: random.Random, median_step_s: float) -> float:
    """SIGKILL a random rank within a random step of a full membership; gives the time."""
    status = run.wait_until(is_full, timeout_s=300)
    wanted = status["step"] + dice.randint(2, 3)
    status = run.wait_until(lambda s: is_full(s) and s["step"] >= wanted, timeout_s=300)
    time.sleep(dice.uniform(0, median_step_s))  # anywhere in a step
    status = run.status() or status
    victim = dice.choice([w for w in status["workers"] if w["rank"] is not None])
    at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    run.wait_until(lambda s: s["generation"] > status["generation"], timeout_s=60)
    return at


def is_full(status: dict[str, Any]) -> bool:
    return status["world_size"] == WORKERS and status["phase"] == "running"


def full_step_s(lines: list[dict[str, Any]]) -> float:
    """The median of the steps that followed another one of the same full membership."""
    return statistics.median(
        b["time"] - a["time"]
        for a, b in pairwise(lines)
        if a["generation"] == b["generation"] and b["world_size"] == WORKERS
    )


def kills_of_a_run(
    storage: Path, number: int, steps: int, count: int, dice: random.Random, median_step_s: float
) -> tuple[list[float], list[float], dict[str, Any]]:
    """Seconds of each recovery, and of each growth's gap, beyond a median step of this run; and
    the end. median_step_s: about a step, in which a kill falls."""
    options = {"workers": f"2..{WORKERS}", "steps": steps, "set_": MODEL, **OPTIONS}
    with elastic_run(storage, f"run-{number}", **options) as run:
        killed = [kill_at_random(run, dice, median_step_s) for _ in range(count)]
        result = run.finish(900)
        events, lines = commits(run), run.metrics()
    step_s = full_step_s(lines)
    seconds: list[float] = []
    for at in killed:
        generation = max(e["generation"] for e in events if e["at"] < at)
        after = next(e for e in events if e["generation"] > generation and e["at"] > at)
        seconds.append(after["at"] - at - step_s)
    growths = [
        b["at"] - a["at"] - step_s
        for a, b in pairwise(events)
        if a["generation"] < b["generation"] and not any(a["at"] < k < b["at"] for k in killed)
    ]
    states = [round(r["state_s"], 3) for r in result["recoveries"]]
    said = [round(s, 3) for s in seconds]
    console.print(f"run {number}: {said} s beyond {step_s:.3f} s, state {states} s")
    return (
        seconds,
        growths,
        {
            "lost_steps": result["lost_steps"],
            "sha": result["weights_sha256"],
            "is_complete": [line["step"] for line in lines] == list(range(1, steps + 1)),
            "step_s": step_s,
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--per-run", type=int, default=5, help="kills in one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", default="fsdp", help="pp:2: two pipelines of two stages")
    parser.add_argument("--no-peer", action="store_true", help="do not measure Ray Train")
    arguments = parser.parse_args()
    OPTIONS["parallel"] = arguments.parallel
    dice = random.Random(arguments.seed)
    about = machine(WORKERS)
    console.print(about)
    with storage_directory() as storage:
        sha, median_step_s = baseline(storage, arguments.steps)
        runs = [
            kills_of_a_run(storage, i, arguments.steps, arguments.per_run, dice, median_step_s)
            for i in range(-(-arguments.kills // arguments.per_run))
        ]
    seconds = [s for of_run, *_ in runs for s in of_run]
    growths = [s for _, of_run, _ in runs for s in of_run]
    ends = [end for *_, end in runs]
    step_s = statistics.median(end["step_s"] for end in ends)
    results, is_sound = summary(seconds, ends, sha, step_s)
    beyond_calm = [s + end["step_s"] - median_step_s for of_run, _, end in runs for s in of_run]
    results["uninterrupted"] = (
        f"{median_step_s:.3f} s a step, p50 {statistics.median(beyond_calm):.3f} s"
    )
    results["growth p50"] = f"{statistics.median(growths):.3f} s of {len(growths)}"
    if not arguments.no_peer:
        results |= against_peer("tests.bench.ray_train_fsdp", 15, seconds)
    report(
        f"SIGKILL of one of 4 {arguments.parallel} ranks", list(results), [list(results.values())]
    )
    setting = f"{len(seconds)} kills in {len(runs)} runs, bitwise, snapshots every step"
    record(f"{arguments.parallel} recovery", about=about, setting=setting, results=results)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
