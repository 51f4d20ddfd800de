"""Runs of experiments: `elastic run` in a process, killed and looked at from outside.

The jobs are those of tests/cluster/jobs and jobs.py; `--anywhere` makes the same with a few
CPU workers, which says whether a script works, and nothing of a GPU.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.cluster.live import JOBS, LiveRun
from tests.gpu.experiment import Table, quantile

TOY = f"{JOBS}/toy.py:Toy"
FAULTY = f"{JOBS}/faulty.py:Faulty"
WIDE = f"{Path(__file__).with_name('jobs.py')}:Wide"
SLOW = 3600.0


def options(parser: argparse.ArgumentParser) -> None:
    """Of every script that starts runs."""
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="cpu tries the script")
    parser.add_argument("--address", default="local", help="of a Ray cluster")
    parser.add_argument("--storage", help="that every host sees; else a folder in /tmp")


@dataclass
class Place:
    """Where the runs of one script are."""

    storage: Path
    ray_temp: Path
    arguments: argparse.Namespace

    def run(self, name: str, target: str = TOY, **changes: Any) -> LiveRun:
        """A context manager."""
        given = self.arguments
        plain = {
            "workers": given.workers, "device": given.device, "address": given.address,
            "global_batch": 8 * given.workers, "micro_batch": 4, "max_failures": 100,
        }  # fmt: skip
        return LiveRun(target, self.storage, name, self.ray_temp, **{**plain, **changes})


@contextmanager
def place(arguments: argparse.Namespace) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    try:
        storage = Path(arguments.storage) if arguments.storage else folder / "runs"
        yield Place(storage, folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- what is seen of a run -------------------------------------------------------------------
def whole(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], bool]:
    """All workers train."""
    return lambda s: s["phase"] == "running" and s["world_size"] == arguments.workers


def pids(status: dict[str, Any]) -> dict[str, int]:
    return {w["id"]: w["pid"] for w in status["workers"]}


def step_times(run: LiveRun) -> list[tuple[int, float]]:
    """(step, Unix time of its commit)."""
    return [(line["step"], line["time"]) for line in run.lines("metrics.jsonl")]


def first_step_after(run: LiveRun, at: float) -> float:
    """Seconds from `at` until the next commit but one: the step at hand may have been over."""
    later = [t - at for _, t in step_times(run) if t > at]
    return later[1] if len(later) > 1 else SLOW


def longest_gap(run: LiveRun) -> float:
    times = [t for _, t in step_times(run)]
    return max((b - a for a, b in pairwise(times)), default=0.0)


def memory_of(process: int) -> float:
    """MiB that it holds on its GPU; 0 where nobody says so."""
    fields = "--query-compute-apps=pid,used_memory"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0.0
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return sum(float(used) for pid, used in rows if int(pid) == process)


# --- what is done to it ------------------------------------------------------------------------
def kill_at_random(run: LiveRun, arguments: argparse.Namespace, drawn: random.Random) -> float:
    """Once all train, at a random instant of a step; the Unix time."""
    status = run.wait_for(whole(arguments), SLOW)
    run.wait_for(lambda s: s["step"] > status["step"] + 1, SLOW)
    time.sleep(drawn.random() * 0.5)
    return run.kill(drawn.randrange(arguments.workers))


def send(run: LiveRun, rank: int, what: signal.Signals) -> float:
    status = run.status()
    os.kill(next(w["pid"] for w in status["workers"] if w["rank"] == rank), what)
    return time.time()


def judge_end(table: Table, name: str, end: dict[str, Any], undisturbed: str) -> None:
    """It has succeeded, lost no step, and has the bits of the undisturbed run."""
    result = end["result"] or {}
    table.holds(f"{name}: succeeded", end["status"] == 0, f"status {end['status']}")
    table.at_most(f"{name}: lost steps", result.get("lost_steps", SLOW), 0)
    if undisturbed:
        same = result.get("weights_sha256") == undisturbed
        table.holds(f"{name}: the undisturbed run's hash", same)
    if end["status"]:
        print(end["err"][-3000:])


def judge_recoveries(table: Table, name: str, result: dict[str, Any], p50: float, p99: float):
    seconds = [r["total_s"] for r in result["recoveries"]] or [SLOW]
    table.at_most(f"{name}: kill to next step, p50", quantile(seconds, 0.5), p50, "s")
    table.at_most(f"{name}: kill to next step, p99", quantile(seconds, 0.99), p99, "s")
    causes = [r["cause"] for r in result["recoveries"]]
    told = ", ".join(f"{causes.count(c)} {c}" for c in sorted(set(causes)))
    table.tell(f"{name}: who noticed first", told)


def hash_of(at: Place, name: str, target: str = TOY, **changes: Any) -> str:
    """Of the undisturbed run."""
    with at.run(name, target, **changes) as run:
        end = run.finish(SLOW)
    assert end["status"] == 0, end["err"]
    return end["result"]["weights_sha256"]


# --- two hosts ---------------------------------------------------------------------------------
def two_hosts(parser: argparse.ArgumentParser) -> None:
    """Of scripts whose faults a person makes: commands in a shell of this machine."""
    options(parser)
    parser.add_argument("--fault", required=True, help="a shell command, such as ssh b ip link ...")
    parser.add_argument("--mend", default="", help="a shell command")
    parser.add_argument("--steps", type=int, default=400)


def shell(command: str) -> float:
    """The Unix time when it was over."""
    if command:
        subprocess.run(command, shell=True, check=True, timeout=120)
    return time.time()
