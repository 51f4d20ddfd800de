"""Where a rank's rows are on the host: memory that the next generation's rows take again.

Fresh memory costs a page fault per 4 KiB, and in a virtual machine often another one of its host:
for a hundred megabytes 0.03 to 0.4 s, just when everybody waits for them.
"""

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from elastic.protocol.mesh import Mesh
from workers.parallel.shards import TensorLayout
from workers.train_state.snapshot import aligned

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux: address space only, until it is written to. (Python knows its name since 3.13.)"""


class RowMemory:
    """Room for the rows of one state. Its owner takes rows only when nobody needs those of before;
    what still refers to them reads something else then, as after an optimizer step."""

    def __init__(self) -> None:
        self._area: mmap.mmap | None = None
        self._used = 0

    @property
    def is_used(self) -> bool:
        """Rows have been taken."""
        return self._used > 0

    def take(self, kinds: Iterable[TensorLayout], mesh: Mesh, rank: int) -> dict[str, Tensor]:
        """`rank`'s rows of every sharded tensor, undefined, each a storage of its own; fewer or
        none where the system has no such memory to give."""
        sharded = [k for k in kinds if k.is_sharded and k.row_bytes]
        places: list[tuple[TensorLayout, int]] = []
        used = 0
        for kind in (k for k in sharded if k.rows(mesh, rank)):
            places.append((kind, used))
            used += aligned(_room_rows(kind, mesh, rank) * kind.row_bytes)
        area = self._room(sum(aligned(k.shape[0] * k.row_bytes) for k in sharded))
        if area is None:
            return {}
        self._discard(used, self._used)
        self._used = used
        return {kind.name: _rows(area, at, kind, mesh, rank) for kind, at in places}

    def _room(self, size_bytes: int) -> mmap.mmap | None:
        """Addresses for all rows there are: however many fall to this rank, they stay in place."""
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

    def discard(self, rows: Tensor) -> None:
        """Nobody needs them: their pages go back to the system. Rows from elsewhere are left."""
        if self._area is None or rows.device.type != "cpu" or not rows.numel():
            return
        first = torch.frombuffer(self._area, dtype=torch.uint8, count=1).data_ptr()
        begin = rows.data_ptr() - first
        if 0 <= begin < self._used:
            self._discard(begin, begin + rows.nbytes)

    def _discard(self, begin: int, end: int) -> None:
        """Whole pages only."""
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._area is not None and begin < end:
            self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _room_rows(kind: TensorLayout, mesh: Mesh, rank: int) -> int:
    """With FSDP2's padding behind those of a parameter, so that they need not move for it."""
    rows = len(kind.rows(mesh, rank))
    return -(-kind.shape[0] // mesh.num_shards) if kind.name.startswith("model/") else rows


def _rows(area: mmap.mmap, at: int, kind: TensorLayout, mesh: Mesh, rank: int) -> Tensor:
    room_rows = _room_rows(kind, mesh, rank)
    count = room_rows * kind.row_bytes // kind.dtype.itemsize
    room = torch.frombuffer(area, dtype=kind.dtype, count=count, offset=at)
    return room.view(room_rows, *kind.shape[1:])[: len(kind.rows(mesh, rank))]
