"""Processes that are stopped for a while, or again and again, and woken: the clock is the caller's,
who may look in a thread of its own.

A process that runs for a part of each period only is slow without a change to it (`slow`); its
heartbeats come in time, because a period is shorter than any of theirs.
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from elastic.protocol.errors import WrongInput

PERIOD_S = 0.1
Row = dict[str, Any]
"""Of status.json's `workers`."""


@dataclass(slots=True)
class Held:
    row: Row
    until: float
    slower: float = inf
    """How many times as long what it does takes; infinite: it is stopped throughout."""
    next_at: float = 0.0
    """When it is stopped or woken next."""
    is_stopped: bool = True


class Freezer:
    def __init__(
        self, send: Callable[[Row, signal.Signals], object], tell: Callable[[str], None]
    ) -> None:
        self._send, self._tell = send, tell
        self._held: list[Held] = []
        self._lock = threading.Lock()

    def leave(self, row: Row) -> None:
        """It is neither stopped nor woken any more, until it is held or slow again."""
        with self._lock:
            self._release(row)

    def hold(self, row: Row, until: float) -> None:
        """It has been stopped, and is woken then."""
        with self._lock:
            self._release(row)
            self._held.append(Held(row, until, next_at=until))

    def slow(self, row: Row, slower: float, until: float) -> None:
        with self._lock:
            self._release(row)
            self._held.append(Held(row, until, slower, is_stopped=False))

    def look(self, now: float) -> None:
        """Often. now: monotonic seconds."""
        with self._lock:
            for held in list(self._held):
                if now >= held.until:
                    self._held.remove(held)
                    self._wake(held)
                elif now >= held.next_at:
                    self._turn(held, now)

    def _release(self, row: Row) -> None:
        self._held = [held for held in self._held if held.row["pid"] != row["pid"]]

    def _turn(self, held: Held, now: float) -> None:
        held.is_stopped = not held.is_stopped
        runs_s = PERIOD_S / held.slower
        held.next_at = now + (PERIOD_S - runs_s if held.is_stopped else runs_s)
        try:
            self._send(held.row, signal.SIGSTOP if held.is_stopped else signal.SIGCONT)
        except (OSError, WrongInput):  # killed meanwhile
            self._held.remove(held)

    def _wake(self, held: Held) -> None:
        try:
            self._send(held.row, signal.SIGCONT)
        except (OSError, WrongInput) as error:
            if held.slower == inf:
                self._tell(f"{held.row.get('id') or 'the process'} was not woken: {error}")
