"""Where a rank's shards are on the host: memory that the next generation's shards take again.

Fresh memory costs a page fault per 4 KiB, and in a virtual machine often another one of its host:
for a hundred megabytes 0.03 to 0.4 s, just when everybody waits for them.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from elastic.protocol.layout import Position, TensorLayout
from workers.resharding.memory import PlainMemory, ShardMemory
from workers.tensors.local import dtype_of
from workers.train_state.snapshot import aligned

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux: address space only, until it is written to. (Python knows its name since 3.13.)"""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers for what `mallopt` sets."""


class HostMemory(PlainMemory):
    """See `workers.resharding.memory.ShardMemory`."""

    can_reuse = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._area: mmap.mmap | None = None
        self._used = 0

    @property
    def is_used(self) -> bool:
        return self._used > 0

    def take(self, layouts: Sequence[TensorLayout], to: Position) -> dict[str, Tensor]:
        """Each shard is a storage of its own; where the system has no such memory to give, and of
        what is not cut, torch's."""
        cut = [layout for layout in layouts if layout.is_cut]
        places: list[tuple[TensorLayout, int]] = []
        used = 0
        for layout in (layout for layout in cut if layout.box(to).size):
            places.append((layout, used))
            used += aligned(_size_bytes(layout, _room(layout, to)))
        area = self._reserve(sum(aligned(_size_bytes(t, t.shape)) for t in cut))
        found = {} if area is None else {t.name: _shard(area, at, t, to) for t, at in places}
        if area is not None:
            self._discard(used, self._used)
            self._used = used
        return {t.name: found[t.name] if t.name in found else self.take_one(t, to) for t in layouts}

    def _reserve(self, size_bytes: int) -> mmap.mmap | None:
        """Addresses for all shards there are: those of this rank stay in place, however many."""
        if self._area is not None and len(self._area) >= size_bytes:
            return self._area
        self._area, self._used = None, 0
        if size_bytes and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            with suppress(OSError):
                self._area = mmap.mmap(-1, size_bytes, flags=flags)
                with suppress(OSError):  # a kernel without huge pages
                    self._area.madvise(mmap.MADV_HUGEPAGE)
        return self._area

    def vacate(self) -> None:
        if not self.is_used:
            give_back()

    def drop(self, shards: Iterable[Tensor]) -> None:
        """Their pages go back to the system."""
        for shard in shards:
            if self._area is not None and shard.device.type == "cpu" and shard.numel():
                first = torch.frombuffer(self._area, dtype=torch.uint8, count=1).data_ptr()
                begin = shard.data_ptr() - first
                if 0 <= begin < self._used:
                    self._discard(begin, begin + shard.nbytes)
        give_back()

    def beside(self) -> "HostMemory":
        return HostMemory()

    def _discard(self, begin: int, end: int) -> None:
        """Whole pages only."""
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._area is not None and begin < end:
            self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def memory_on(device: torch.device) -> ShardMemory:
    return HostMemory() if device.type == "cpu" else PlainMemory(device)


def keep_freed() -> None:
    """From now on this process keeps what it frees, for its next step, where the C library can do
    that (glibc, of up to 32 MiB at a time): else gradients are new pages in each step. `give_back`
    gives it to the system."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 32 << 20)
        set_option(_TRIM_THRESHOLD, -1)


def give_back() -> None:
    """Freed memory goes to the system, where the C library can do that (glibc): it keeps what is
    too small for a mapping of its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _size_bytes(layout: TensorLayout, shape: tuple[int, ...]) -> int:
    return dtype_of(layout).itemsize * math.prod(shape)


def _room(layout: TensorLayout, to: Position) -> tuple[int, ...]:
    """The shape of a shard with FSDP2's padding, which a parameter has behind its last row: so it
    need not move for it."""
    shape = layout.box(to).shape
    if not layout.cuts or layout.blocks or not layout.name.startswith("model/"):
        return shape
    first = Position(to.mesh, to.mesh.ranks()[0])
    return (layout.box(first).shape[0], *shape[1:])


def _shard(area: mmap.mmap, at: int, layout: TensorLayout, to: Position) -> Tensor:
    room = _room(layout, to)
    flat = torch.frombuffer(area, dtype=dtype_of(layout), count=math.prod(room), offset=at)
    return flat.view(room)[: layout.box(to).shape[0]]
