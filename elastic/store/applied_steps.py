"""`AppliedSteps`: metrics.jsonl of a script's run, a line for each step of its optimizers.

Lines come by calls of the script, and may come more than once; each is written once, in order. A
step that survivors have done again, without what a lost rank had told of it, takes the place of
that. What they say is told by workers/scripts/in_place/applied.py, by each lowest rank all that it
does not know to be on record. The engine's own steps, which are a
script's reports, are in commits.jsonl (run_directory.py).
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic.protocol.step_record import AppliedRecord, StepMetrics
from elastic.store.files import Folder, encode
from elastic.store.journal import LineFile, lines_backwards
from elastic.store.run_directory import ROLLED_BACK
from elastic.store.step_lines import end_of_step, end_without_moved, step_of

NAME = "metrics.jsonl"


class AppliedSteps:
    """The file, and the one of lines that were moved aside."""

    def __init__(self, directory: Path, remote: Folder | None, lock: threading.Lock) -> None:
        """Ends a roll back that a crash has interrupted. remote: where storage cannot append. lock:
        who brings lines over holds it."""
        self._directory, self._remote, self._lock = directory, remote, lock
        self.lines = LineFile(directory / NAME, remote)
        is_there = (directory / ROLLED_BACK).exists()
        if not is_there and remote is not None:
            is_there = any(name.startswith(ROLLED_BACK) for name in remote.names())
        self.moved = LineFile(directory / ROLLED_BACK, remote) if is_there else None
        if self.moved is not None:
            cut = end_without_moved(self.lines.path, self.moved.path)
            if cut < self.lines.path.stat().st_size:
                self.lines.truncate_here(cut)
        self.last, self._generation = self._end()
        """The step of the last line, and its generation."""
        self._call = 0
        """The newest that has told of steps."""
        self._written = self._uploaded = AppliedRecord()
        self._waiting: list[StepMetrics] = []
        """Not looked at yet: there was no room on the disk when they came."""
        self._is_aside = False
        """What is moved aside at hand is with the other file."""

    @property
    def files(self) -> tuple[LineFile | None, ...]:
        """In the order in which they are closed."""
        return (self.moved, self.lines)

    @property
    def safe(self) -> AppliedRecord:
        """What is on record whatever becomes of this process."""
        return self._written if self._remote is None else self._uploaded

    def record(self, call: int, base: int, steps: Sequence[StepMetrics]) -> list[StepMetrics]:
        """Those that are new, which are on record now.

        call: the generation in which the call of the script has begun that they are of. base: it
        has begun behind so many steps; later ones on record, of calls before it, move aside.
        OSError if they cannot be written; the next call does it then.
        """
        if call < self._call:  # of a rank that was lost, late
            return []
        if call > self._call:
            self._waiting = [step for step in self._waiting if step.step <= base]
        self._call = call
        self._waiting += steps
        if base < self.last and self._generation < call:
            with self._lock:
                self._go_back(base)
        new: list[StepMetrics] = []
        for step in self._waiting:
            if step.step <= self.last and self._is_done_again(step):
                with self._lock:
                    self._go_back(step.step - 1)
            if step.step > self.last:
                self.lines.keep(encode(step.to_line()) + b"\n")
                self.last, self._generation = step.step, step.generation
                new.append(step)
        self._waiting = []
        self.lines.write()
        self._written = AppliedRecord(call, self.last, self._generation)
        return new

    def upload(self) -> None:
        """Lines that were moved aside come first: nobody could tell them from newer ones."""
        if self.moved is not None:
            self.moved.upload()
        written = self._written
        self.lines.upload()
        self._uploaded = written

    def _is_done_again(self, step: StepMetrics) -> bool:
        """What is on record of it was seen to its end by ranks only that are lost."""
        if step.generation <= self._generation:
            return False
        self.lines.write()
        for _, raw in lines_backwards(self.lines.path):
            if step_of(self.lines.path, raw) == step.step:
                return json.loads(raw)["samples"] != step.samples
        return False

    def _go_back(self, step: int) -> None:
        self.lines.write()
        end = end_of_step(self.lines.path, step)
        with self.lines.path.open("rb") as file:
            file.seek(end)
            later = file.read()
        if self.moved is None:
            self.moved = LineFile(self._directory / ROLLED_BACK, self._remote, is_new=True)
        if not self._is_aside:
            self.moved.keep(later)
            self._is_aside = True
        self.moved.sync()
        self.lines.truncate_here(end)
        self._is_aside = False
        self.last, self._generation = self._end()

    def _end(self) -> tuple[int, int]:
        for _, raw in lines_backwards(self.lines.path):
            return step_of(self.lines.path, raw), int(json.loads(raw).get("generation", 0))
        return 0, 0
