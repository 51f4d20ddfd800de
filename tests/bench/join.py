"""A worker joins a running job: the longest gap between two commits, minus one median step.

At the default model and with about 10 times its state; the gap must hardly depend on the size. A
fault makes the room: one of 2 workers is killed, and its replacement is the one that joins. Two
ranks, so that on 2 cores the newcomer brings its own, as a machine that joins does.
    python -m tests.bench.join --joins 9 [--parallel pp:2]
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.harness import (
    console,
    elastic_run,
    lines_of,
    machine,
    record,
    report,
    storage_directory,
)

WORKERS = 2
SIZES = {
    "1x": {"width": 160, "layers": 3},
    "10x": {"width": 384, "layers": 6, "context": 16},  # 10.7 M parameters, short windows
}


@dataclass(frozen=True)
class Join:
    """Seconds. The longest interval between two commits from the newcomer's start until two
    steps after its entry, and the median step of the generation that it came to."""

    longest_s: float
    usual_s: float

    @property
    def gap_s(self) -> float:
        return self.longest_s - self.usual_s


def joins_of_a_run(
    storage: Path, name: str, settings: dict[str, int], count: int, parallel: str
) -> list[Join]:
    """Kill the newest of 2 workers `count` times; each time its replacement joins the other."""
    options = {"workers": f"{WORKERS - 1}..{WORKERS}", "steps": 10_000, "max_failures": 99}
    options |= {"global_batch": 64, "micro_batch": 8, "parallel": parallel}
    with elastic_run(storage, name, **options, set_=settings) as run:
        status = run.wait_until(lambda s: is_full(s) and s["step"] >= 8, timeout_s=300)
        for _ in range(count):
            generation, pid = status["generation"], status["workers"][-1]["pid"]
            os.kill(pid, signal.SIGKILL)
            status = run.wait_until(lambda s, g=generation: is_full(s) and s["generation"] > g, 300)
            entered = status["step"]
            status = run.wait_until(lambda s, e=entered: s["step"] >= e + 6, timeout_s=300)
        lines = run.metrics()
        started = times_of(run.directory / "journal.jsonl", "WorkerStarted")
    found: list[Join] = []
    for before, after in itertools.pairwise(lines):
        if after["world_size"] == WORKERS > before["world_size"] and after["step"] > 8:
            since = max(t for t in started if t < after["time"])
            near = [
                later["time"] - earlier["time"]
                for earlier, later in itertools.pairwise(lines)
                if later["time"] > since and later["step"] <= after["step"] + 2
            ]
            smaller = [x["step_s"] for x in lines if x["generation"] == before["generation"]]
            found.append(Join(max(near), statistics.median(smaller)))
    console.print(f"{name}: {[round(j.gap_s, 3) for j in found]} s")
    return found


def is_full(status: dict[str, Any]) -> bool:
    return status["world_size"] == WORKERS and status["phase"] == "running"


def times_of(journal: Path, event: str) -> list[float]:
    """When events of this kind happened, Unix seconds."""
    entries = [line.get("entry", {}).get("event", {}) for line in lines_of(journal)]
    return [e["at"] for e in entries if e.get("type") == event]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--joins", type=int, default=9, help="per size, three in a run")
    parser.add_argument("--parallel", default="ddp")
    arguments = parser.parse_args()
    about = machine(WORKERS)
    console.print(about)
    joins: dict[str, list[Join]] = {size: [] for size in SIZES}
    with storage_directory() as storage:
        for number in range(-(-arguments.joins // 3)):  # alternating sizes
            for size, settings in SIZES.items():
                name, parallel = f"{size}-{number}", arguments.parallel
                joins[size] += joins_of_a_run(storage, name, settings, 3, parallel)
    gaps = {size: statistics.median(j.gap_s for j in found) for size, found in joins.items()}
    results: dict[str, str] = {}
    for size, found in joins.items():
        usual = statistics.median(j.usual_s for j in found)
        results[f"median step {size}"] = f"{usual:.3f} s"
        results[f"gap {size}"] = f"{gaps[size]:.3f} s"
        results[f"worst gap {size}"] = f"{max(j.gap_s for j in found):.3f} s"
    results["gap 10x to 1x"] = f"{gaps['10x'] / gaps['1x']:.1f}" if gaps["1x"] > 0 else "none at 1x"
    report("A worker joins a running job", list(results), [list(results.values())])
    count = min(len(found) for found in joins.values())
    setting = f"{arguments.parallel}, 1 to 2 workers, {count} joins per size"
    record("join", about=about, setting=setting, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
