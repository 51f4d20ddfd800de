"""SIGKILL of one of 4 workers at random instants: time to the next committed step, and the bits.

Recovery = time of the first commit of a later generation - time of the kill - one median step. All
runs must lose no step and end with the weights of the uninterrupted run. With `--peer` one kill
under tuned Ray Train, in the same run of the benchmark, gives the ratio.
    python -m tests.bench.recovery --kills 50
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.harness import (
    REPOSITORY,
    Run,
    console,
    elastic_run,
    environment,
    machine,
    percentile,
    record,
    report,
    storage_directory,
)

WORKERS = 4
WARM_STEPS = 5
OPTIONS = {
    "max_failures": 99,
    "global_batch": 64,
    "micro_batch": 8,
    "seed": 0,
    "reduction": "bitwise",
}


def baseline(storage: Path, steps: int) -> tuple[str, float]:
    """The uninterrupted run: its hash and its median step."""
    with elastic_run(storage, "calm", workers=WORKERS, steps=steps, **OPTIONS) as run:
        result = run.finish(600)
        times = [line["time"] for line in run.metrics()[WARM_STEPS:]]
    return result["weights_sha256"], median_step(times)


def kill_at_random(run: Run, dice: random.Random) -> tuple[float, int]:
    """SIGKILL a random rank at a random instant; gives the time and the generation killed."""
    calm = dice.randint(3, 8)  # steps with all workers before it
    status = run.wait_until(lambda s: is_full(s), timeout_s=300)
    wanted, generation = status["step"] + calm, status["generation"]
    status = run.wait_until(
        lambda s: is_full(s) and s["step"] >= wanted and s["generation"] >= generation,
        timeout_s=300,
    )
    time.sleep(dice.uniform(0, 0.6))  # anywhere in a step: forward, backward, collective, vote
    status = run.status() or status
    victim = dice.choice([w for w in status["workers"] if w["rank"] is not None])
    at = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    return at, status["generation"]


def is_full(status: dict[str, Any]) -> bool:
    return status["world_size"] == WORKERS and status["phase"] == "running"


def kills_of_a_run(
    storage: Path,
    number: int,
    steps: int,
    count: int,
    dice: random.Random,
    **more: object,
) -> tuple[list[float], dict[str, Any]]:
    """Recovery seconds of `count` kills in one run, each with all workers back, and the end."""
    options = {"workers": f"2..{WORKERS}", "steps": steps, **OPTIONS, **more}
    killed: list[tuple[float, int]] = []
    with elastic_run(storage, f"run-{number}", **options) as run:
        for _ in range(count):
            killed.append(kill_at_random(run, dice))
        result = run.finish(900)
        lines = run.metrics()
    seconds: list[float] = []
    for killed_at, generation in killed:
        recovered = next(
            line for line in lines if line["generation"] > generation and line["time"] > killed_at
        )
        before = [line["time"] for line in lines if line["generation"] == generation]
        usual = median_step(before[1:]) or median_step([line["time"] for line in lines])
        seconds.append(recovered["time"] - killed_at - usual)
    found = {
        "lost_steps": result["lost_steps"],
        "sha": result["weights_sha256"],
        "is_complete": [line["step"] for line in lines] == list(range(1, steps + 1)),
    }
    console.print(f"run {number}: {[round(s, 3) for s in seconds]} s, {result['recoveries']}")
    return seconds, found


def median_step(times: list[float]) -> float:
    """Seconds from a commit to the next one; 0 where there are not two."""
    return statistics.median([b - a for a, b in pairwise(times)] or [0.0])


def against_peer(module: str, kill_at: int, seconds: list[float]) -> dict[str, str]:
    """The same kill in tuned Ray Train, run by `module`: what is recorded of it."""
    command = [sys.executable, "-m", module, "--workers", str(WORKERS), "--kill-at", str(kill_at)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"the peer failed: {done.stderr[-2000:]}")
    peer = json.loads(done.stdout.splitlines()[-1])
    peer_s = peer["recovery_s"] - peer["median_step_s"]
    return {
        "Ray Train tuned": f"{peer_s:.1f} s, {peer['redone_steps']} steps redone",
        "ratio": f"{peer_s / max(percentile(seconds, 50), 1e-3):.0f}x",
    }


def summary(
    seconds: list[float], ends: list[dict[str, Any]], sha: str, median_step_s: float
) -> tuple[dict[str, str], bool]:
    """What is recorded, and whether no run lost a step or a bit."""
    equal = sum(end["sha"] == sha for end in ends)
    lost = sum(end["lost_steps"] for end in ends)
    complete = sum(end["is_complete"] for end in ends)
    results = {
        "p50": f"{percentile(seconds, 50):.3f} s",
        "p90": f"{percentile(seconds, 90):.3f} s",
        "worst": f"{max(seconds):.3f} s",
        "lost steps": str(lost),
        "equal hashes": f"{equal}/{len(ends)} runs",
        "gapless metrics": f"{complete}/{len(ends)} runs",
        "median step": f"{median_step_s:.3f} s",
    }
    return results, equal == complete == len(ends) and not lost


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--per-run", type=int, default=5, help="kills in one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peer", action="store_true", help="do not measure Ray Train")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    about = machine(WORKERS)
    console.print(about)
    with storage_directory() as storage:
        sha, median_step_s = baseline(storage, arguments.steps)
        runs = [
            kills_of_a_run(storage, i, arguments.steps, arguments.per_run, dice)
            for i in range(-(-arguments.kills // arguments.per_run))
        ]
    seconds = [s for of_run, _ in runs for s in of_run]
    results, is_sound = summary(seconds, [end for _, end in runs], sha, median_step_s)
    if not arguments.no_peer:
        results |= against_peer("tests.bench.ray_train", 25, seconds)
    report("SIGKILL of one of 4 workers", list(results), [list(results.values())])
    record(
        "recovery",
        about=about,
        setting=f"{len(seconds)} kills in {len(runs)} runs, bitwise",
        results=results,
    )
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
