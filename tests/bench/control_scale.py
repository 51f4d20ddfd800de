"""Times of the decision core with 1,000, 10,000 and 100,000 workers (no processes: events only).

    python -m tests.bench.control_scale

"loss" is one WorkerLost alone; "form" is Form plus every Joined; "recover" is a whole recovery:
the loss, an answer of each survivor, the next Form and every Joined.
"""

import os
import statistics
import time
from collections.abc import Callable

from elastic.control.suspicion import Heartbeat, Watch, suspects
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


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, median of {REPEATS}, seconds")
    for size in SIZES:
        runs = [measure(size) for _ in range(REPEATS)]
        medians = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        print(f"{size:>7}  " + "  ".join(f"{name} {s:.4f}" for name, s in medians.items()))


if __name__ == "__main__":
    main()
