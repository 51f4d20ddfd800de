"""What a holder holds: copies of ranks' shards, verified, and which of them may go.

Plain bytes: no torch, no sockets (server.py), no idea of what a state consists of.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import accumulate
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from operator import add
from typing import Any, NamedTuple, cast

from isal import isal_zlib

from elastic.protocol.layout import BlockSets, Box
from elastic.protocol.mesh import Cuts
from elastic.protocol.messages.backup import Slice

_crc32 = cast(Callable[[memoryview, int], int], isal_zlib.crc32)  # pyright: ignore[reportUnknownMemberType]

NUM_GENERATIONS = 2
"""Snapshots of a rank that are kept: one that is whole everywhere, one that may become so."""


Room = bytearray | mmap
"""Memory of a holder's own."""


def crc32(*stretches: memoryview) -> int:
    """Of bytes that lie in these stretches."""
    found = 0
    for stretch in stretches:
        found = _crc32(stretch, found)
    return found


class DamagedCopy(Exception):
    """A copy whose bytes are not those that were sent."""


class Stale(Exception):
    """A copy from a generation that has a successor."""


class Key(NamedTuple):
    """Whose copy of which step. `generation`: in which it was made. `rank`: by the mesh's order."""

    generation: int
    rank: int
    step: int


@dataclass(slots=True)
class Copy:
    """A rank's shard of one step."""

    key: Key
    origin: int
    """The generation that computed the step: copies of one origin and step make one state."""
    world_size: int
    state: Any
    """The JSON part of the state."""
    slices: tuple[Slice, ...]
    content: Room | memoryview
    """The slices, one after the other; or memory that the trainer shares."""
    sums: tuple[int, ...] = ()
    """The CRC-32 of each slice."""
    offsets: tuple[int, ...] | None = None
    """Where each slice begins in shared memory."""
    cuts: Cuts = ()
    """As `Mesh.cuts`."""
    lacks: BlockSets = ()
    """As `Position.lacks`."""
    places: dict[str, tuple[int, Slice]] = field(default_factory=dict[str, tuple[int, Slice]])
    """Name -> where its slice begins in `content`."""

    def __post_init__(self) -> None:
        sizes = [piece.size_bytes for piece in self.slices]
        offsets = self.offsets or tuple(accumulate(sizes, initial=0))[:-1]
        for at, piece in zip(offsets, self.slices, strict=True):
            self.places[piece.layout.name] = (at, piece)
        needed = max(map(add, offsets, sizes), default=0)
        if needed > len(self.content) or (self.offsets is None and needed < len(self.content)):
            raise DamagedCopy(f"{len(self.content)} bytes for slices of {sum(sizes)}")

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.slices)

    def check(self, names: Collection[str] | None = None) -> None:
        """The slices of these names; None: all. Raises DamagedCopy."""
        whole = memoryview(self.content)
        for (name, (at, piece)), expected in zip(self.places.items(), self.sums, strict=True):
            if names is not None and name not in names:
                continue
            if crc32(whole[at : at + piece.size_bytes]) != expected:
                raise DamagedCopy(f"rank {self.key.rank}, step {self.key.step}: {name}")

    def stretches(self, name: str, box: Box) -> list[memoryview]:
        """Where a box of a tensor lies, counted in the whole one. LookupError if it is not here."""
        at, piece = self.places[name]
        if box.intersection(piece.box) != box:
            raise LookupError(f"{box} of {name}")
        element_bytes = piece.size_bytes // piece.box.size
        content = memoryview(self.content)
        return [
            content[at + run.start * element_bytes : at + run.stop * element_bytes]
            for run in box.runs(piece.box)
        ]


class BackupStore:
    """The copies of one holder. Not for several threads at once."""

    def __init__(self) -> None:
        self._copies: dict[Key, Copy] = {}
        self._free: list[Room] = []
        self.generation = 0
        """The newest that has brought a copy."""

    def room(self, size_bytes: int) -> Room:
        """Memory for a copy to come: used before if there is some, which is already mapped. New
        memory is mapped as it is written: to fill a bytearray holds the GIL, a second per GB, and
        a holder that is silent for so long is taken for frozen."""
        for i, free in enumerate(self._free):
            if len(free) == size_bytes:
                return self._free.pop(i)
        if self._free:
            del self._free[0]
        if not size_bytes:
            return bytearray()
        return mmap(-1, size_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)

    def put(self, copy: Copy) -> None:
        """Take a copy in that has been checked, or is shared memory. Raises Stale."""
        if copy.key.generation < self.generation:
            self._reuse(copy)
            raise Stale(f"generation {copy.key.generation}, {self.generation} has begun")
        self.generation = copy.key.generation
        self._copies[copy.key] = copy
        of_rank = sorted(k for k in self._copies if k[:2] == copy.key[:2])
        for key in of_rank[:-NUM_GENERATIONS]:
            self._drop(key)

    def settle(self, generation: int, step: int) -> None:
        """Every rank's copy of `step` is held, made in `generation`: nothing older is needed."""
        for key in tuple(self._copies):
            if key.generation < generation or (key.generation == generation and key.step < step):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._reuse(self._copies.pop(key))
        num_ranks = len({k.rank for k in self._copies}) + 1
        del self._free[:-num_ranks]

    def _reuse(self, copy: Copy) -> None:
        if not isinstance(copy.content, memoryview):
            self._free.append(copy.content)

    def copies(self) -> list[Copy]:
        """Whoever reads one checks it then: all at once would take seconds."""
        return list(self._copies.values())

    def remove(self, key: Key) -> None:
        """A copy that is not what was sent any more; its memory is not used again."""
        self._copies.pop(key, None)

    def copy(self, key: Key) -> Copy:
        """LookupError if it is not here."""
        return self._copies[key]
