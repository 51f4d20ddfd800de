"""What a script may do once in a process, and finds undone when it is called again in it."""

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def forget_accelerate() -> None:
    """What Accelerate, and Hugging Face's Trainer on it, remember for the whole process: that the
    process group is there, ranks, and how gradients are accumulated."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def give_back_memory() -> None:
    """What nothing refers to any more goes, and its pages go back to the system: the allocator
    would keep them, and fill them again at other places."""
    gc.collect()
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
