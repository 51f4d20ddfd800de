"""Own copies in memory that a holder of the same node maps instead of being sent a copy.

The trainer allocates and writes; the mapping keeps the bytes when the trainer is gone. Who maps
what, and until when it is left alone, is server.py's and client.py's.
"""

import itertools
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from typing import Any

import torch
from torch import Tensor

from elastic.protocol.messages.backup import Shared
from workers.distributed.captures import take_no_part
from workers.train_state.snapshot import Arena, aligned

_serials = itertools.count()


class SharedArena(Arena):
    """An arena in a file without a name (memfd_create, Linux)."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        super().__init__(is_pinned=is_pinned)
        self._file: FileIO | None = None
        self._serial = -1

    def reserve(self, shapes: Iterable[tuple[torch.dtype, Sequence[int]]]) -> None:
        """Room for such tensors. New memory takes its time: a page fault per 4 KiB."""
        size_bytes = sum(aligned(dtype.itemsize * math.prod(shape)) for dtype, shape in shapes)
        if self._flat.nbytes >= size_bytes:
            return
        if self._file is None:
            self._file = FileIO(os.memfd_create("backup"), "r+")
        begun, self._serial = self._flat.nbytes, next(_serials)
        self._file.truncate(size_bytes)
        area = mmap.mmap(self._file.fileno(), size_bytes)
        flat = torch.frombuffer(area, dtype=torch.uint8)
        flat[begun:].zero_()
        if self._is_pinned:
            pin(area, flat)
        self._flat = flat  # not before: another thread may take from it at once

    def describe(self, tensors: Mapping[str, Tensor]) -> Shared | None:
        """How another process of this node finds them; None if some are elsewhere."""
        begin, size_bytes = self._flat.data_ptr(), self._flat.nbytes
        offsets = [t.data_ptr() - begin if t.numel() else 0 for t in tensors.values()]
        ends = [at + t.nbytes for at, t in zip(offsets, tensors.values(), strict=True)]
        if self._file is None or min(offsets, default=0) < 0 or max(ends, default=0) > size_bytes:
            return None
        file = self._file.fileno()
        path = f"/proc/{os.getpid()}/fd/{file}"
        inode = os.fstat(file).st_ino
        return Shared(path, inode, self._serial, size_bytes, tuple(offsets))


def pin(area: mmap.mmap, flat: Tensor) -> None:
    """CUDA writes to it at once, as long as it is mapped. Where that is refused (a limit on locked
    memory), it writes beside it, and the host copies."""
    take_no_part()
    runtime: Any = torch.cuda.cudart()
    address = flat.data_ptr()
    if int(runtime.cudaHostRegister(address, flat.nbytes, 0)) == 0:
        weakref.finalize(area, runtime.cudaHostUnregister, address)
