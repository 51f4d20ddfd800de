"""A script of Ray Train's as it is: under Ray Train itself, tuned, and on elastic at a level.

Each pair runs the same file (script_job.py) once under each, in processes of their own. Measured:
command to first step, by `elastic run` and by the import of elastic.ray_train; SIGKILL of rank 1 to
the first step of the new call (level 0) or to the next applied step less one step (level 1), and
steps redone; the median step without faults, and how far the losses of all steps differ; 1,000
reports without a checkpoint. Ray Train is tuned as in ray_train.py. Reports through kills and the
time that a join takes are measured without a peer (script_reports.py). What 20 calls leave behind
is tests/scripts/test_called_often.py's.
    python -m tests.bench.scripts --pairs 9 --workers 3
    python -m tests.bench.scripts --pairs 9 --level 0
    python -m tests.bench.scripts --pairs 3 --only reports
    python -m tests.bench.scripts --only start
    python -m tests.bench.scripts --only kept --workers 4 --kills 50
    python -m tests.bench.scripts --only join --workers 3 --pairs 9
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.harness import REPOSITORY, console, environment, lines_of, machine, record
from tests.bench.ray_train import TUNED, figures, kill_one
from tests.bench.script_reports import OURS, measure_join, measure_kept

SCRIPT = REPOSITORY / "tests" / "bench" / "script_job.py"
REPORTS = 1000
FEW_STEPS = 99
"""Before them: what starts along with a run is over then, and no checkpoint is reported."""
THEIRS_REPORTS = 20
"""Of Ray Train's: each takes seconds, so that a few are measured and 1,000 told."""
PATIENCE_S = 900.0
RAYS_OWN = (
    "import os, runpy, sys, ray; "
    "ray.init(num_cpus=int(os.environ['CPUS']), include_dashboard=False, log_to_driver=False); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""With room for all workers, as elastic's own start has it."""


def run(
    command: Sequence[str], *, steps: int, workers: int, kill_at: int = 0, reports: int = 0
) -> dict[str, Any]:
    """One run of the script; what it marked, as ray_train.py's figures and more."""
    with tempfile.TemporaryDirectory(prefix="bs-") as scratch:
        folder = Path(scratch)
        arguments = [str(folder), "--workers", str(workers), "--steps", str(steps)]
        arguments += ["--reports", str(reports)]
        env = {**environment(), **TUNED, "CPUS": str(workers + 2), "RAY_TMPDIR": scratch}
        killed: dict[str, float] = {}
        if kill_at:
            threading.Thread(target=kill_one, args=(folder, kill_at, killed), daemon=True).start()
        begun_at = time.time()
        with (folder / "output").open("w") as output:
            process = subprocess.run(
                [*command, str(SCRIPT), *arguments],
                env=env,
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_S,
                check=False,
            )
        if process.returncode:
            console.print((folder / "output").read_text()[-4000:])
            raise RuntimeError(f"{command} ended with {process.returncode}")
        marks = lines_of(folder / "steps.jsonl")
        reports_s = float((folder / "reports_s").read_text())
    found = figures(marks, begun_at, time.time(), {})
    if killed:
        found |= recovery(marks, killed["at"], found["median_step_s"])
    found["losses"] = [mark["loss"] for mark in marks]
    found["own_first_s"] = marks[0]["time"] - marks[0]["entered_at"]
    found["reports_s"] = reports_s
    return found


def recovery(marks: list[dict[str, Any]], at: float, step_s: float) -> dict[str, Any]:
    """After a kill at that time."""
    called_again = [mark for mark in marks if mark["entered_at"] > at]
    if called_again:
        resumed = called_again[0]
        before = max(m["step"] for m in marks if m["time"] < resumed["time"])
        return {
            "recovery_s": resumed["time"] - at,
            "redone_steps": before - resumed["step"] + 1,
            "calls_again": 1,
        }
    later = [(a, b) for a, b in itertools.pairwise(marks) if b["time"] > at]
    # the step in flight may still end, and the next one waits: later gaps are others' doing
    _, applied = max(later[:2], key=lambda pair: pair[1]["time"] - pair[0]["time"])
    return {
        "recovery_s": applied["time"] - at - step_s,
        "redone_steps": sum(b["step"] <= a["step"] for a, b in itertools.pairwise(marks)),
        "calls_again": 0,
    }


BY_IMPORT = [
    sys.executable,
    "-c",
    "import elastic.ray_train, runpy, sys; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
]
"""As with the line in the script."""
THEIRS = [sys.executable, "-c", RAYS_OWN]


def medians(found: list[dict[str, Any]], key: str) -> str:
    values = [f[key] for f in found]
    return f"{statistics.median(values):.3f} (worst {max(values):.3f})"


def measure_kill(pairs: int, workers: int) -> dict[str, str]:
    def killed(command: Sequence[str]) -> dict[str, Any]:
        return run(command, steps=400, workers=workers, kill_at=150)

    ours, theirs = in_turn(pairs, lambda: killed(OURS), lambda: killed(THEIRS))
    ratio = statistics.median(f["recovery_s"] for f in theirs) / statistics.median(
        f["recovery_s"] for f in ours
    )
    return {
        "kill to the next step, s": medians(ours, "recovery_s"),
        "Ray Train": medians(theirs, "recovery_s"),
        "times faster": f"{ratio:.1f}",
        "the function's own time to its first step, s": medians(ours, "own_first_s"),
        "steps redone": medians(ours, "redone_steps"),
        "Ray Train's": medians(theirs, "redone_steps"),
        "runs in which survivors called the function again": str(
            sum(f["calls_again"] for f in ours)
        ),
    }


def measure_calm(pairs: int, workers: int) -> dict[str, str]:
    def calm(command: Sequence[str]) -> dict[str, Any]:
        return run(command, steps=600, workers=workers)

    ours, theirs = in_turn(pairs, lambda: calm(OURS), lambda: calm(THEIRS))
    ratios = [t["median_step_s"] / o["median_step_s"] for o, t in zip(ours, theirs, strict=True)]
    return {
        "steps per second against Ray Train": f"{statistics.median(ratios):.3f}",
        "largest relative difference of a step's loss": f"{differ(ours, theirs):.1e}",
        "command to first step, s": f"{medians(ours, 'first_step_s')} against "
        f"{medians(theirs, 'first_step_s')}",
    }


def differ(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    return max(
        abs(a - b) / abs(b)
        for o, t in zip(ours, theirs, strict=True)
        for a, b in zip(o["losses"], t["losses"], strict=True)
    )


def measure_reports(pairs: int, workers: int) -> dict[str, str]:
    def ours() -> dict[str, Any]:
        return run(OURS, steps=FEW_STEPS, workers=workers, reports=REPORTS)

    def theirs() -> dict[str, Any]:
        return run(THEIRS, steps=FEW_STEPS, workers=workers, reports=THEIRS_REPORTS)

    mine, peer = in_turn(pairs, ours, theirs)
    each = statistics.median(f["reports_s"] for f in peer) / THEIRS_REPORTS
    return {
        f"{REPORTS} reports without a checkpoint, s": medians(mine, "reports_s"),
        "Ray Train, s each": f"{each:.3f}",
    }


def measure_start(pairs: int, workers: int) -> dict[str, str]:
    def begun(command: list[str]) -> dict[str, Any]:
        return run(command, steps=2, workers=workers)

    ours, theirs = in_turn(pairs, lambda: begun(BY_IMPORT), lambda: begun(THEIRS))
    ratios = [o["first_step_s"] / t["first_step_s"] for o, t in zip(ours, theirs, strict=True)]
    return {
        "python train.py to its first step, s": medians(ours, "first_step_s"),
        "Ray Train": medians(theirs, "first_step_s"),
        "of Ray Train's": f"{statistics.median(ratios):.3f}",
    }


MEASURES: dict[str, Callable[[int, int], dict[str, str]]] = {
    "kill": measure_kill,
    "calm": measure_calm,
    "reports": measure_reports,
    "start": measure_start,
    "kept": measure_kept,
    "join": measure_join,
}


def in_turn(
    pairs: int, first: Callable[[], dict[str, Any]], second: Callable[[], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """So that a change of the machine's load hits both."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for pair in range(pairs):
        ours.append(first())
        theirs.append(second())
        told = [{k: v for k, v in f.items() if k != "losses"} for f in (ours[-1], theirs[-1])]
        console.print(f"pair {pair + 1}/{pairs}: {told[0]} against {told[1]}")
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50, help="of `kept`")
    parser.add_argument("--level", choices=("0", "1"), default="1")
    parser.add_argument("--only", choices=MEASURES)
    given = parser.parse_args()
    os.environ.update(TUNED, ELASTIC_SCRIPT_LEVEL=given.level)
    about = machine(given.workers)
    for name, measure in MEASURES.items():
        if given.only in (None, name):
            times = given.kills if name == "kept" else given.pairs
            results = measure(times, given.workers)
            setting = f"{name}: {given.workers} workers, {times} times"
            record(f"scripts, level {given.level}", about=about, setting=setting, results=results)


if __name__ == "__main__":
    main()
