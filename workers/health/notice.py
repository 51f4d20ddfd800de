"""SIGTERM to a worker, or its machine's spot notice: it trains on, and says that it will be gone.

What follows from it is elastic/control's. Who asks the cloud is spot.py. Ray by itself would end
the process at once.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

NOTICE_S = 10.0
"""How long a process usually has between SIGTERM and SIGKILL: containers 10 s or 30 s, spot
instances 30 s or 120 s."""


class Notice:
    """Made in the main thread; its own thread is told of the signal whatever the main one does."""

    def __init__(self, say: Callable[[str, float], None]) -> None:
        """say: called with the cause and the seconds that are left, at the first SIGTERM, by
        `hear`, and by `repeat`."""
        self._say = say
        self._cause, self._ends_at = "", math.inf
        self._inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        self._outbox = outbox  # the signal's number is written here at once, without the GIL
        signal.signal(signal.SIGTERM, _ignore)
        signal.siginterrupt(signal.SIGTERM, False)
        signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._listen, name="notice", daemon=True).start()

    def repeat(self) -> None:
        """Say it to another controller, if there is anything to say."""
        if self._cause:
            self._say(self._cause, max(0.0, self._ends_at - time.monotonic()))

    def hear(self, cause: str, left_s: float) -> None:
        """The end comes in so many seconds, unless it is known to come earlier."""
        ends_at = time.monotonic() + left_s
        if ends_at < self._ends_at:
            self._cause, self._ends_at = cause, ends_at
            self.repeat()

    def _listen(self) -> None:
        while True:
            if signal.SIGTERM in self._inbox.recv(64):
                self.hear("SIGTERM", NOTICE_S)


def _forget() -> None:
    """A forked child is no worker: SIGTERM ends it, and tells nobody else."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ignore(*_: object) -> None:
    """Python writes to the wakeup socket only for signals that have a handler."""
