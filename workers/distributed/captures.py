"""Threads of ours beside the user's, which may be capturing a CUDA graph.

While any thread captures in CUDA's "global" mode, as `torch.cuda.graph` does, CUDA refuses to other
threads what could disturb a capture, such as to look at an event, and gives the capture up. A
thread may say that it has no part in others' captures, as torch's own threads do.
"""

import ctypes
import threading
from functools import cache
from typing import Any

LIBRARY = "libcuda.so.1"
THREAD_LOCAL = 1
"""CUDA's number: only what this thread captures itself forbids it anything."""
_thread = threading.local()


def take_no_part() -> None:
    """From now on this thread heeds no captures but its own. Where there is no CUDA, there are
    none."""
    if getattr(_thread, "is_told", False):
        return
    _thread.is_told = True
    if (library := driver()) is not None:
        mode = ctypes.c_int(THREAD_LOCAL)
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def driver() -> Any | None:
    """None where there is none."""
    try:
        found = ctypes.CDLL(LIBRARY)
        found.cuThreadExchangeStreamCaptureMode  # noqa: B018  (since CUDA 10.1)
    except (OSError, AttributeError):
        return None
    return found
