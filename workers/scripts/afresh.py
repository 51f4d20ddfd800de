"""What a script may do once in a process, and finds undone when it is called again in it."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_start_method() -> Iterator[None]:
    """Within, a script may choose how processes are started, as in a new one."""
    before = multiprocessing.get_start_method(allow_none=True)
    choose: Any = multiprocessing.set_start_method
    choose(None, force=True)
    try:
        yield
    finally:
        choose(before, force=True)
