"""`Course`: how fast a run's steps come, when it will be done, its loss so far, its last report.

From lines of metrics.jsonl, in bounded memory however long the run is. What that looks like is
screen.py's.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeGuard

from elastic.store.files import Folder
from elastic.store.journal import as_object

RECENT_S = 30.0
MOST_RECENT = 1000
"""Steps from which a speed is taken, at most so old and at most so many."""
MOST_LOSSES = 256
NUM_SAMPLED, SAMPLED_BYTES = 64, 4096
"""Places of a long file at which a line is read, for the loss before its end."""


class Course:
    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=MOST_RECENT)
        """Step and Unix time."""
        self.losses: list[tuple[int, float]] = []
        """Step and loss, of all of the run in equal distances, more or less."""
        self._every = 1
        self.newest: dict[str, Any] = {}
        """The last committed step's line, where it is sound; empty before the first."""
        self.report: dict[str, Any] = {}
        """A script's newest line of reports.jsonl; empty before the first."""

    def hear(self, lines: Iterable[dict[str, Any]]) -> None:
        """Of metrics.jsonl, in their order. After a roll back earlier steps come again."""
        for line in lines:
            step, at, loss = (line.get(name) for name in ("step", "time", "loss"))
            if not isinstance(step, int):
                continue
            while self._recent and self._recent[-1][0] >= step:
                self._recent.pop()
            while self.losses and self.losses[-1][0] >= step:
                self.losses.pop()
            if is_number(at):
                self._recent.append((step, at))
            if is_number(loss) and (not self.losses or step - self.losses[-1][0] >= self._every):
                self.losses.append((step, loss))
        while self._recent and self._recent[-1][1] - self._recent[0][1] > RECENT_S:
            self._recent.popleft()
        while len(self.losses) > MOST_LOSSES:
            self.losses = self.losses[::2]
            self._every = max(1, 2 * (self.losses[-1][0] - self.losses[0][0]) // MOST_LOSSES)

    @property
    def steps_per_s(self) -> float | None:
        """Of the last steps, whatever happened between them; None before there are two."""
        if len(self._recent) < 2:
            return None
        (first, begun), (last, ended) = self._recent[0], self._recent[-1]
        return (last - first) / (ended - begun) if ended > begun else None

    def left_s(self, steps: int) -> float | None:
        """Seconds until so many steps are committed, at this speed; None if nobody knows."""
        if (speed := self.steps_per_s) is None:
            return None
        return max(0, steps - self._recent[-1][0]) / speed


def is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def sampled(folder: Folder, name: str, last_bytes: int) -> list[dict[str, Any]]:
    """Some lines of a local file, in equal distances, of what lies before its last bytes."""
    if folder.local is None or (before := (folder.size(name) or 0) - last_bytes) <= 0:
        return []
    found: list[dict[str, Any]] = []
    with (folder.local / name).open("rb") as file:
        for n in range(NUM_SAMPLED):
            offset = before * n // NUM_SAMPLED
            file.seek(offset)
            lines = file.read(SAMPLED_BYTES).split(b"\n")
            whole = lines[0] if offset == 0 else lines[1] if len(lines) > 2 else b""
            if (line := as_object(whole)) is not None:
                found.append(line)
    return found
