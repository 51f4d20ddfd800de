"""An asyncio loop whose clock moves on only when all of its tasks wait: however slow the machine
is, timers run in their order, and what takes no time takes none.

For tasks that wait for each other and for timers; who waits for another thread or process needs
real time.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

ANSWER_S = 0.05
"""Real time for this host's kernel to answer a connection, before virtual time moves on."""


class _Skipping(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        has_sockets = len(self.get_map()) > 1  # the loop itself has one
        real_s = ANSWER_S if has_sockets else 0.0
        found = super().select(real_s if timeout is None else min(timeout, real_s))
        if not found and timeout is None:
            return super().select()
        if not found and timeout is not None:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


CLOCK = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
"""Instead of the module `time`, in a module that is run by such a loop."""
