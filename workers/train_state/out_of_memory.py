"""Memory that a worker does not get while it takes on a state: the loss of this worker alone.

It is what the kernel's own killer would make of it, a moment earlier, and with words.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from elastic.protocol.errors import DoesNotFit, OutOfDeviceMemory
from elastic.store.files import first_line
from workers.distributed.device_errors import is_memory

REFUSED = "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"
"""In torch's RuntimeError for the host, and for a library's own memory on a device; for its
allocator's it has a class."""
Error = TypeVar("Error", bound=BaseException)


class OutOfMemory(BaseException):
    """Others may have more: the run goes on without this worker. Unwinds the user's loop."""


@contextmanager
def told_as_loss(doing: str) -> Iterator[None]:
    """Raises OutOfMemory for whatever says so within. doing: for a person."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not says_no_memory(error):
            raise
        raise OutOfMemory(f"out of memory while {doing}: {first_line(error)}") from error


def does_not_fit(error: Error, world_size: int, fitted_over: int) -> Error | DoesNotFit:
    """`error`, or DoesNotFit in its place if it is of memory, in a step of fewer members than those
    who committed the one before: the run waits for more of them, and nobody is lost."""
    is_shortage = isinstance(error, Exception) and says_no_memory(error)
    if not is_shortage or world_size >= fitted_over:
        return error
    text = (
        f"step and state fit over {fitted_over} workers, and not over {world_size}: "
        f"{first_line(error)}"
    )
    error.add_note(text)  # behind the vote it is the run's end
    return DoesNotFit(text, world_size)


def says_no_memory(error: Exception) -> bool:
    is_told = isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSED)
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfDeviceMemory)
    return is_told or is_system or is_of_memory or is_memory(error)
