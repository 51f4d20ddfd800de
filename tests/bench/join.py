"""A worker joins a running job: the longest gap between two commits, minus one median step.

At the default model and with about 10 times its state; the gap must hardly depend on the size. A
fault makes the room: one of 3 workers is killed, and its replacement is the one that joins.
    python -m tests.bench.join --joins 9
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.bench.harness import (
    console,
    elastic_run,
    machine,
    record,
    report,
    storage_directory,
)

WORKERS = 3
SIZES = {
    "1x": {"width": 160, "layers": 3},
    "10x": {"width": 384, "layers": 6, "context": 16},  # 10.7 M parameters, short windows
}


def gap_of_join(lines: list[dict[str, Any]]) -> float | None:
    """Longest gap around the first growth, minus a median step; None if nobody joined."""
    for before, after in itertools.pairwise(lines):
        if after["world_size"] > before["world_size"] and before["step"] > 5:
            near = [
                later["time"] - earlier["time"]
                for earlier, later in itertools.pairwise(lines)
                if abs(later["step"] - after["step"]) <= 2
            ]
            smaller = [line["step_s"] for line in lines if line["world_size"] < WORKERS]
            return max(near) - statistics.median(smaller)
    return None


def one_join(storage: Path, name: str, settings: dict[str, int], steps: int) -> float:
    options = {"workers": f"2..{WORKERS}", "steps": steps, "global_batch": 64, "micro_batch": 8}
    with elastic_run(storage, name, **options, set_=settings) as run:
        status = run.wait_until(
            lambda s: s["world_size"] == WORKERS and s["step"] >= 10 and s["phase"] == "running",
            timeout_s=300,
        )
        os.kill(status["workers"][-1]["pid"], signal.SIGKILL)
        run.wait_until(lambda s: s["world_size"] == WORKERS - 1 and s["phase"] == "running", 60)
        run.finish(900)
        lines = run.metrics()
    lost_at = next(i for i, line in enumerate(lines) if line["generation"] > status["generation"])
    gap = gap_of_join(lines[lost_at:])
    if gap is None:
        raise RuntimeError(f"{name}: the replacement did not join within {steps} steps")
    console.print(f"{name}: {gap:.3f} s")
    return gap


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--joins", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    about = machine(WORKERS)
    console.print(about)
    gaps: dict[str, list[float]] = {size: [] for size in SIZES}
    with storage_directory() as storage:
        for number in range(arguments.joins):  # alternating sizes
            for size, settings in SIZES.items():
                gaps[size].append(one_join(storage, f"{size}-{number}", settings, arguments.steps))
    medians = {size: statistics.median(values) for size, values in gaps.items()}
    results = {
        **{f"gap {size}": f"{value:.3f} s" for size, value in medians.items()},
        **{f"worst {size}": f"{max(values):.3f} s" for size, values in gaps.items()},
        "10x to 1x": f"{medians['10x'] / max(medians['1x'], 1e-3):.2f}",
    }
    report("A worker joins a running job", list(results), [list(results.values())])
    record("join", about=about, setting=f"{arguments.joins} joins per size", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
