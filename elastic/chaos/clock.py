"""`Clock`: what must be looked at in time, while whoever began it waits for a node's answer."""

import threading
import time
from collections.abc import Callable

LOOK_EVERY_S = 0.005
ENDED_S = 60.0
"""How long a last look may take: it may be a question to another node."""


class Clock:
    """Looks again and again, in a thread of its own, from `begin` to `end`."""

    def __init__(self, look: Callable[[float], None]) -> None:
        """look: takes monotonic seconds."""
        self._look, self._is_over = look, threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Once; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_looking, name="clock", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises what a look has raised; after that there was none."""
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(ENDED_S)

    def _keep_looking(self) -> None:
        try:
            while not self._is_over.wait(LOOK_EVERY_S):
                self._look(time.monotonic())
        except Exception as error:
            self._error = error
