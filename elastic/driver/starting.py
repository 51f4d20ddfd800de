"""The steps of a start: one that takes long is told, so that nobody waits without knowing for what.

What a run waits for once its controller is there, that controller tells.
"""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

SLOW_S = 0.3
"""A step that takes no longer is not told: the first line is there within a second."""
UNSEEN_S = 15.0
"""So where the errors go to a file: there, wrong input is one line, and nobody sits and waits."""

Tell = Callable[[str], object]


def tell(line: str) -> None:
    print(f"elastic: {line}", file=sys.stderr, flush=True)


def be_silent(_: str) -> None:
    """For a run whose output nobody reads while it starts."""


@contextmanager
def slow_step(what: str, tell: Tell = tell) -> Generator[None]:
    """The step that the block is; `what` is told if it takes long."""
    timer = threading.Timer(SLOW_S if sys.stderr.isatty() else UNSEEN_S, tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
