"""What a worker shows of itself to its pulse process: step, phase and time, in shared memory.

The pulse (workers/pulse.py) reads it without this process's GIL; nothing here sends anything.
"""

import os
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

PHASES = (
    "starting",
    "lobby",
    "data",
    "feed",
    "compute",
    "reduce",
    "vote",
    "apply",
    "evaluate",
    "save",
    "user",
    "form",
    "gather",
)
"""`lobby`: between generations; `feed`: data that others read is late; `user`: the user's code
outside steps; `compute`: forward and backward; `gather`: a sharded pass waits for its peers' part
of a parameter or gradient. A worker in `reduce`, `vote`, `form` or `gather` waits for its peers."""

WAITING = ("reduce", "vote", "form", "gather")
UNUSUAL = ("starting", "lobby", "feed", "save", "user", "form")
"""Phases without a usual time."""
LAYOUT = struct.Struct("<QqqIdd")  # sequence, generation, step, phase, since (monotonic), p95 or -1
SIZE_BYTES = 4096
_WINDOW = 64


class Vitals:
    """Written by the main thread only; a sequence lock keeps readers from torn values."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("vitals", 0)
        os.ftruncate(self.fd, SIZE_BYTES)
        self._memory = mmap(self.fd, SIZE_BYTES)
        self._sequence = 0
        self._seen: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in PHASES]
        self._phase, self._since = 0, time.monotonic()
        self.generation, self.step = 0, 0
        self._write()

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    def enter(self, phase: str) -> None:
        """The main thread goes on to `phase`."""
        now = time.monotonic()
        self._seen[self._phase].append(now - self._since)
        self._phase, self._since = PHASES.index(phase), now
        self._write()

    def forget(self, phase: str) -> None:
        """What is usual in `phase` is not known any more."""
        self._seen[PHASES.index(phase)].clear()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within: waiting for peers in the middle of a phase, whose time stands still."""
        phase, before, began = self._phase, self._since, time.monotonic()
        self._phase, self._since = PHASES.index("gather"), began
        self._write()
        try:
            yield
        finally:
            now = time.monotonic()
            self._seen[self._phase].append(now - began)
            self._phase, self._since = phase, before + now - began
            self._write()

    def _write(self) -> None:
        seen = self._seen[self._phase]
        is_usual = PHASES[self._phase] not in UNUSUAL and len(seen) >= 8
        p95 = sorted(seen)[int(len(seen) * 0.95)] if is_usual else -1.0
        for parity in (1, 2):
            LAYOUT.pack_into(
                self._memory,
                0,
                self._sequence + parity,
                self.generation,
                self.step,
                self._phase,
                self._since,
                p95,
            )
        self._sequence += 2
