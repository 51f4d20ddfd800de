"""Times of the decision core with 1,000, 10,000 and 100,000 workers (no processes: events only).

    python -m tests.bench.control_scale

"loss" is one WorkerLost alone; "form" is Form plus every Joined; "recover" is a whole recovery:
the loss, an answer of each survivor, the next Form and every Joined.
"""

import statistics
import sys
import time
from collections.abc import Callable

from elastic.control.detection.hang import Watch, suspects
from elastic.protocol.messages.pulse import Heartbeat
from tests.bench.harness import console, machine, record, report
from tests.control.many_workers import ManyWorkers

SIZES = (1_000, 10_000, 100_000)
REPEATS = 3


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(size: int) -> dict[str, float]:
    run = ManyWorkers(size)
    times = {"gather": seconds(run.gather), "form": seconds(lambda: run.join(4.0))}
    times["loss"] = seconds(lambda: run.lose(size - 20, 5.0))
    times["answers"] = seconds(lambda: run.answer(size - 20, 0, 5.1))
    times["join"] = seconds(lambda: run.join(6.0))
    times["recover"] = times["loss"] + times["answers"] + times["join"]
    times["end"] = seconds(lambda: run.end(100, 7.0))
    beats = [Watch(Heartbeat(w, 2, 5, "reduce", 0.1, 0.1, True, "S"), 10.0) for w in range(size)]
    times["suspects"] = seconds(lambda: list(suspects(beats, 10.5, 3.0)))
    return times


def main() -> int:
    about = machine(1)
    console.print(about)
    columns: dict[int, dict[str, float]] = {}
    for size in SIZES:
        runs = [measure(size) for _ in range(REPEATS)]
        columns[size] = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
    rows = [[f"{size:,}", *(f"{s:.4f}" for s in times.values())] for size, times in columns.items()]
    report("The decision core, seconds", ["workers", *columns[SIZES[0]]], rows)
    small, middle, large = (columns[size] for size in SIZES)
    results = {
        "loss": f"{large['loss'] * 1e3:.1f} ms",
        "gather and form": f"{large['gather'] + large['form']:.2f} s",
        "recover": f"{large['recover']:.2f} s",
    }
    for name in ("gather", "form", "recover"):
        results[f"{name} per 10x workers"] = (
            f"{middle[name] / small[name]:.1f}x {large[name] / middle[name]:.1f}x"
        )
    record("control_scale", about=about, setting=f"{SIZES[-1]:,} workers", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
