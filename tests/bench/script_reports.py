"""What becomes of a script's reports when workers are killed, and how long it stands still when one
joins: the runs of `scripts.py --only kept` and `--only join`.

The script is script_reports_job.py, unmodified, on a real Ray. Kept: whatever report has returned
on any rank must be in reports.jsonl, each call must begin at the newest of those or later, and the
checkpoints that are named at the end must be what was reported. Join: from the last step of the
smaller group to the first one of the larger, against the function's own time to its first step in
the run's first call, when all its processes are new.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.harness import REPOSITORY, console, end, environment, lines_of

SCRIPT = REPOSITORY / "tests" / "bench" / "script_reports_job.py"
OURS = (sys.executable, "-m", "elastic", "run")
PATIENCE_S = 300.0
POLL_S = 0.01
KINDS = ("", "reports", "returned")
"""A kill comes at any instant, or once a rank begins to report, or once a report has returned on
a rank, in turn."""
Mark = dict[str, Any]


class Run:
    """Of the script, under way or over."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, workers: int) -> None:
        self.process, self.folder, self.workers = process, folder, workers
        self.directory = folder / "storage" / "run"
        self._marks: list[Mark] = []
        self._num_read = 0
        """Bytes of the file of marks."""

    def marks(self) -> list[Mark]:
        """So far; only what is new is read."""
        file = self.folder / "marks.jsonl"
        if file.exists():
            with file.open("rb") as marks:
                marks.seek(self._num_read)
                new = marks.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._num_read += len(whole)
            self._marks += [json.loads(line) for line in whole.splitlines()]
        return self._marks

    def pids(self) -> list[int]:
        """Of the workers that take part, by their ranks."""
        try:
            status = json.loads((self.directory / "status.json").read_text())
        except FileNotFoundError:
            return []
        return [worker["pid"] for worker in status["workers"]]

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """What the condition gives, once it is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}: {self.output()}")
            time.sleep(POLL_S)
        return found

    def output(self) -> str:
        return (self.folder / "output").read_text()[-4000:]

    def finish(self) -> None:
        (self.folder / "enough").touch()
        self.process.wait(PATIENCE_S)
        if self.process.returncode:
            raise RuntimeError(f"it ended with {self.process.returncode}: {self.output()}")


@contextmanager
def running(workers: int, *options: object) -> Generator[Run]:
    with tempfile.TemporaryDirectory(prefix="bk-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        words = [*OURS, SCRIPT, folder, "--workers", workers, *options]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in words],
                env={**environment(), "RAY_TMPDIR": scratch},
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Run(process, folder, workers)
        finally:
            end(process)


# --- kept ---------------------------------------------------------------------------------------
def measure_kept(kills: int, workers: int) -> dict[str, str]:
    draw = random.Random(19)
    began = time.monotonic()
    with running(workers) as run:
        lost: list[int] = []
        for number in range(kills):
            lost.append(kill(run, KINDS[number % len(KINDS)], draw, lost))
            if not (number + 1) % 10:
                console.print(f"{number + 1} kills in {time.monotonic() - began:.0f} s")
        run.finish()
        return {"kills": str(len(lost)), **kept(run)}


def kill(run: Run, kind: str, draw: random.Random, lost: Sequence[int]) -> int:
    """One of the workers, once more than the least are there again. Gives its pid."""

    def present() -> list[int]:
        pids = run.pids()
        return pids if len(pids) > -(-run.workers // 2) and not {*pids} & {*lost} else []

    run.wait_until(present, "worker to be killed")
    seen = len(run.marks())
    if kind:
        mark = run.wait_until(lambda: newest(run.marks()[seen:], kind), f"mark {kind!r}")
        time.sleep(draw.uniform(0, 0.01))
        pid = mark["pid"]
    else:
        time.sleep(draw.uniform(0, 0.3))
        pid = draw.choice(run.wait_until(present, "worker to be killed"))
    os.kill(pid, signal.SIGKILL)
    return pid


def newest(marks: Sequence[Mark], kind: str) -> Mark | None:
    return next((mark for mark in reversed(marks) if mark["kind"] == kind), None)


def kept(run: Run) -> dict[str, str]:
    """What a run that is over has lost."""
    marks, reports = run.marks(), lines_of(run.directory / "reports.jsonl")
    on_record = [line["metrics"]["step"] for line in reports if line["checkpoint"]]
    names = {line["checkpoint"]: line["metrics"]["step"] for line in reports if line["checkpoint"]}
    returned = [mark for mark in marks if mark["kind"] == "returned"]
    entered = [mark for mark in marks if mark["kind"] == "entered"]
    too_old = [
        mark
        for mark in entered
        if mark["step"] < max((r["step"] for r in returned if r["time"] < mark["time"]), default=0)
    ]
    others = [mark for mark in entered if names.get(mark["checkpoint"], 0) != mark["step"]]
    found, expected = checkpoints(run.directory)
    return {
        "reports that had returned": str(len({mark["step"] for mark in returned})),
        "of them lost": str(len({mark["step"] for mark in returned} - set(on_record))),
        "on record twice": str(len(on_record) - len(set(on_record))),
        "times that a rank began": str(len(entered)),
        "at an older report": str(len(too_old)),
        "at another state than reported": str(len(others)),
        "checkpoints at the end": f"{found} of {expected} as reported",
    }


def checkpoints(directory: Path) -> tuple[int, int]:
    """How many of the ones that Ray's `Result` names are what was reported, and how many it
    names."""
    import torch
    from ray.train import Result

    result: Any = Result.from_path(str(directory))
    newest, best = (result.checkpoint, result.metrics), result.best_checkpoints
    sound = 0
    for checkpoint, metrics in (newest, *best):
        with checkpoint.as_directory() as folder:
            sound += torch.load(Path(folder) / "state.pt")["step"] == metrics["step"]
    return sound, 1 + len(best)


# --- join ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One call that all workers have begun, behind a smaller one."""

    still_s: float
    """From the last step of the call before to its first."""
    redone: int


def measure_join(joins: int, workers: int) -> dict[str, str]:
    with running(workers, "--every", 10) as run:
        for number in range(joins):
            run.wait_until(lambda n=number: is_under_way(run, 1 + n), f"call of all, {number}")
            pid = run.wait_until(lambda: whole(run), "full number of workers")[1]
            os.kill(pid, signal.SIGKILL)
        run.wait_until(lambda: is_under_way(run, 1 + joins), "last join")
        run.finish()
        marks = run.marks()
    own_s, entries = joined(marks, workers)
    still = [entry.still_s for entry in entries]
    beyond = [entry.still_s - own_s for entry in entries]
    return {
        "joins": str(len(entries)),
        "time without steps, s": told(still),
        "the function's own time to its first step, s": f"{own_s:.3f}",
        "beyond it, s": told(beyond),
        "steps redone": str(max(entry.redone for entry in entries)),
    }


def told(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} (worst {max(values):.3f})"


def whole(run: Run) -> list[int]:
    pids = run.pids()
    return pids if len(pids) == run.workers else []


def is_under_way(run: Run, num_calls: int) -> bool:
    """So many calls of all workers have begun, and the newest has made some steps."""
    entered = [m for m in run.marks() if is_entry(m, run.workers)]
    if len(entered) < num_calls * run.workers:
        return False
    newest = entered[-1]["time"]
    later = [m for m in run.marks() if m["kind"] == "stepped" and m["time"] > newest]
    return len(later) >= 3 * run.workers


def is_entry(mark: Mark, workers: int) -> bool:
    """Into a call of so many ranks."""
    return mark["kind"] == "entered" and mark["world"] == workers


def calls_of(marks: Sequence[Mark], workers: int) -> list[list[Mark]]:
    """The steps of each call that so many ranks have begun, on all of them, in order."""
    entered = [m for m in marks if is_entry(m, workers)]
    whole = [entered[i : i + workers] for i in range(0, len(entered) - workers + 1, workers)]
    seats = [{(mark["pid"], mark["entered_at"]) for mark in call} for call in whole]
    stepped = [mark for mark in marks if mark["kind"] == "stepped"]
    return [[m for m in stepped if (m["pid"], m["entered_at"]) in seat] for seat in seats]


def joined(marks: Sequence[Mark], workers: int) -> tuple[float, list[Entry]]:
    """The function's own time to its first step, by who has entered last, and the joins."""
    calls = [call for call in calls_of(marks, workers) if call]
    first = calls[0][0]
    own_s = first["time"] - max(mark["entered_at"] for mark in calls[0])
    entries: list[Entry] = []
    for _, call in pairwise(calls):
        seats = {(mark["pid"], mark["entered_at"]) for mark in call}
        before = [
            mark
            for mark in marks
            if mark["kind"] == "stepped"
            and mark["time"] < call[0]["time"]
            and (mark["pid"], mark["entered_at"]) not in seats
        ]
        last = max(mark["step"] for mark in before)
        still_s = call[0]["time"] - max(mark["time"] for mark in before)
        entries.append(Entry(still_s, last - call[0]["step"] + 1))
    return own_s, entries
