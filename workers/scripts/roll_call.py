"""Where a rank's script is, told now and then: so it is found who does not come to what others wait
in.

What follows from the ranks' words is elastic/control/reporting.py's.
"""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from elastic.protocol.messages.to_controller import ScriptMove

LOOK_EVERY_S = 5.0
"""Whoever waits for so long says it."""
SAID_EVERY_S = 15.0
ENDS_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
OF_OTHERS = (
    *(f"{ROOT / room}{os.sep}" for room in ("elastic", "workers")),
    *(f"{path}{os.sep}" for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}),
    "<frozen ",
)
"""Where files begin that are no script's."""


class RollCall:
    """Within: a thread says where the main thread is. Leave it in the thread that made it."""

    def __init__(
        self,
        send: Callable[[Any], None],
        seat: Callable[[], tuple[int, int]],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """send: may be called in any thread. seat: generation and rank of this process now."""
        self._send, self._seat, self._every_s = send, seat, every_s
        self._waits: tuple[str, float] | None = None
        """In what, and since when."""
        self._waited_s = 0.0
        """So far, all together."""
        self._asked = time.monotonic(), 0.0
        """When it was asked last for the rank's own part, and how long it had waited by then."""
        self.data_s = 0.0
        """For so long the script has waited for its data since it was asked last."""
        self._counts: dict[str, int] = {}
        self._said_wait = False
        self._main = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_saying, name="roll call", daemon=True)

    def __enter__(self) -> "RollCall":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(ENDS_S)  # it is a daemon: what it is in may not answer

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Within, this rank waits for the others: in the next call of what all call alike. What the
        script has called itself is told, and not what that waits in."""
        if self._waits is not None:
            yield
            return
        number = self._counts[what] = self._counts.get(what, 0) + 1
        began = time.monotonic()
        self._waits = f"{what} number {number}", began
        try:
            yield
        finally:
            self._waits = None
            self._waited_s += time.monotonic() - began
            if self._said_wait:
                self._say("", 0.0)

    def take_own_s(self) -> tuple[float, float]:
        """Seconds, since it was asked last, in which this rank has waited for nobody; and those of
        them in which it has waited for its data."""
        now, (since, waited_s), data_s = time.monotonic(), self._asked, self.data_s
        self._asked, self.data_s = (now, self._waited_s), 0.0
        own_s = now - since - (self._waited_s - waited_s)
        return own_s, min(data_s, own_s)

    def _keep_saying(self) -> None:
        said_at = time.monotonic()
        while not self._is_over.wait(self._every_s):
            now, waits = time.monotonic(), self._waits
            waited_s = now - waits[1] if waits is not None else 0.0
            if waits is not None and waited_s >= self._every_s:
                self._said_wait = True
                self._say(waits[0], waited_s)
            elif now - said_at < SAID_EVERY_S * self._every_s / LOOK_EVERY_S:
                continue
            else:
                self._say("", 0.0)
            said_at = now

    def _say(self, waits_in: str, waited_s: float) -> None:
        if not waits_in:
            self._said_wait = False
        generation, rank = self._seat()
        place = place_of(sys._current_frames().get(self._main))
        self._send(ScriptMove(generation, rank, waits_in, round(waited_s, 1), place))


def place_of(frame: FrameType | None) -> str:
    """The script's own line that a stack is at, as train.py:87; empty if it is at none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OF_OTHERS) and "site-packages" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
