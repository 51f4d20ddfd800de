"""What NVIDIA's management library says of a GPU beyond torch: the driver, bad memory, slices.

It is loaded when it is asked for; where there is none, nothing is known. Nothing is decided here.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
UNCORRECTED, SINCE_RESET = 1, 0
"""Its numbers for a kind of memory error and a time."""
MAX_TEXT = 96


@dataclass(frozen=True, slots=True)
class Health:
    """Of one GPU's memory."""

    uncorrected: int = 0
    """Errors since the driver was loaded that data was lost by."""
    needs_reset: bool = False
    """A row of it is bad, and is replaced by the next reset."""
    has_no_spare: bool = False
    """A bad row could not be replaced: there is none left."""


class Nvml:
    """The library, initialised."""

    def __init__(self, library: Any) -> None:
        """library: as ctypes loads it. OSError if it does not work here."""
        self._library = library
        if library.nvmlInit_v2():
            raise OSError("NVML cannot be initialised")

    @property
    def driver(self) -> str:
        return self._text(self._library.nvmlSystemGetDriverVersion)

    def health(self, uuid: str) -> Health:
        """What is not known of this GPU counts as good."""
        gpu = self._handle(uuid)
        if gpu is None:
            return Health()
        count = ctypes.c_ulonglong()
        status = self._library.nvmlDeviceGetTotalEccErrors(
            gpu, UNCORRECTED, SINCE_RESET, ctypes.byref(count)
        )
        uncorrected = 0 if status else count.value
        numbers = [ctypes.c_uint() for _ in range(4)]
        if self._library.nvmlDeviceGetRemappedRows(gpu, *map(ctypes.byref, numbers)):
            return Health(uncorrected)
        _, _, is_pending, has_failed = (bool(n.value) for n in numbers)
        return Health(uncorrected, is_pending, has_failed)

    def whole_of(self, uuid: str) -> str:
        """The UUID of the GPU that this one is a slice of; empty if it is none."""
        gpu = self._handle(uuid)
        is_slice = ctypes.c_uint()
        if gpu is None or self._library.nvmlDeviceIsMigDeviceHandle(gpu, ctypes.byref(is_slice)):
            return ""
        whole = ctypes.c_void_p()
        if not is_slice.value or self._library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
            gpu, ctypes.byref(whole)
        ):
            return ""
        return self._text(lambda *room: self._library.nvmlDeviceGetUUID(whole, *room))

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        found = ctypes.c_void_p()
        failed = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(found))
        return None if failed else found

    def _text(self, ask: Callable[..., int]) -> str:
        room = ctypes.create_string_buffer(MAX_TEXT)
        return "" if ask(room, MAX_TEXT) else room.value.decode()


@cache
def nvml() -> Nvml | None:
    """None where there is none."""
    try:
        return Nvml(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError):
        return None
