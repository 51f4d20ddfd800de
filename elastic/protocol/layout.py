"""Where the elements of a tensor are: dense boxes of it (`Box`), and which one a position in a mesh
holds (`TensorLayout`).

Who is where in a mesh is mesh.py's, the tensors themselves are the workers'.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from elastic.protocol.mesh import AXES, Axis, Mesh


@dataclass(frozen=True, slots=True)
class Box:
    """A dense part of a tensor. A scalar has no dims, and its only box is itself."""

    start: tuple[int, ...]
    """The lowest index in each dim."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """As one indexes it: [2:4, 0:3]."""
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(at + size for at, size in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def intersection(self, other: "Box") -> "Box | None":
        """The common box, None if there is no common element."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(b - a for a, b in zip(start, map(min, self.stop, other.stop), strict=True))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def without(self, corner: "Box") -> list["Box"]:
        """What is left of it, as boxes, the first ones first. corner: a box in it that begins where
        it does."""
        left: list[Box] = []
        start, shape = list(self.start), list(self.shape)
        for dim, taken in enumerate(corner.shape):
            rest = self.shape[dim] - taken
            if rest:
                after = start.copy()
                after[dim] += taken
                left.append(Box(tuple(after), (*shape[:dim], rest, *shape[dim + 1 :])))
            shape[dim] = taken
        return left[::-1]

    def relative_to(self, outer: "Box") -> "Box":
        """As it lies in `outer`."""
        start = tuple(at - of for at, of in zip(self.start, outer.start, strict=True))
        return Box(start, self.shape)

    def runs(self, outer: "Box") -> Iterator[range]:
        """Where its elements lie in `outer`, which contains it, if that is stored in C order: as
        few stretches as there are, in its own C order."""
        inner = len(self.shape)  # dims from here on are whole: their elements lie in one stretch
        while inner and self.shape[inner - 1] == outer.shape[inner - 1]:
            inner -= 1
        strides = [math.prod(outer.shape[dim + 1 :]) for dim in range(len(outer.shape))]
        within = self.relative_to(outer).start
        begin = sum(at * stride for at, stride in zip(within, strides, strict=True))
        last = max(inner - 1, 0)  # the one dim of a stretch that may be in parts
        length = math.prod(self.shape[last:])
        for index in product(*map(range, self.shape[:last])) if length else ():
            first = begin + sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield range(first, first + length)


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


def cut(size: int, num_parts: int, index: int) -> range:
    """A part of a dim, as FSDP2 and DTensor cut it: 8 in 3 gives 3, 3, 2; 4 in 3 gives 2, 2, 0."""
    each = -(-size // num_parts)
    return range(min(index * each, size), min((index + 1) * each, size))


ROWS: tuple[tuple[Axis, int], ...] = (("dp_shard", 0),)
"""Each of those who share a tensor has some of its rows."""


BlockSets: TypeAlias = tuple[tuple[int, ...], ...]
"""As `TensorLayout.blocks`, of several tensors."""


@dataclass(frozen=True, slots=True)
class Position:
    """Who holds the boxes of `rank` of `mesh`."""

    mesh: Mesh
    rank: int
    lacks: BlockSets = ()
    """Of tensors of these blocks it has nothing all the same, as a copy of what lives on one node
    only."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor of the state, and how the ranks of a mesh share it."""

    name: str
    dtype: str
    """As torch says it, without its prefix: `float32`."""
    shape: tuple[int, ...]
    cuts: tuple[tuple[Axis, int], ...] = ()
    """Which axis cuts which dim: (("dp_shard", 0), ("tp", 1)). Of two that cut the same dim the
    first one is the outer. What no axis cuts every rank has, also one that is inactive."""
    blocks: tuple[int, ...] = ()
    """Of a model in stages, those that need the tensor: who holds one of them has all of it, or of
    what `cuts` says a part as all ranks with these blocks share it, and the others nothing. Empty:
    every rank has it."""

    def __post_init__(self) -> None:
        axes = [axis for axis, _ in self.cuts]
        for axis, dim in self.cuts:
            if axis not in AXES:
                raise ValueError(f"{self.name}: {axis!r} is no axis; choose from {', '.join(AXES)}")
            if axes.count(axis) > 1:
                raise ValueError(f"{self.name}: {axis} cuts two dims; a rank would hold no box")
            if not 0 <= dim < len(self.shape):
                raise ValueError(f"{self.name}: {axis} cuts dim {dim} of shape {list(self.shape)}")

    @property
    def is_cut(self) -> bool:
        return bool(self.cuts or self.blocks)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Ranks that are in the same place on these hold the same box."""
        of_cuts = [axis for axis, _ in self.cuts]
        return tuple(axis for axis in AXES if axis in of_cuts)

    def box(self, at: Position) -> Box:
        """What the position holds; empty if it has none of it."""
        if self.blocks:
            return self._box_of_stage(at)
        start, shape = [0] * len(self.shape), list(self.shape)
        for axis, dim in self.cuts:
            part = range(0)
            if not at.mesh.is_inactive(at.rank):
                index = at.mesh.coordinate(axis, at.rank)
                part = cut(shape[dim], at.mesh.size(axis), index)
            start[dim], shape[dim] = start[dim] + part.start, len(part)
        return Box(tuple(start), tuple(shape))

    def _box_of_stage(self, at: Position) -> Box:
        held = at.mesh.blocks(at.rank)
        if self.blocks in at.lacks or not any(block in held for block in self.blocks):
            return whole((0, *self.shape[1:]))
        if not self.cuts:
            return whole(self.shape)
        assert self.cuts == ROWS, self
        ranks = at.mesh.ranks_with_blocks(self.blocks)
        rows = cut(self.shape[0], len(ranks), ranks.index(at.rank))
        return Box((rows.start, *(0 for _ in self.shape[1:])), (len(rows), *self.shape[1:]))

    def own(self, at: Position) -> Box | None:
        """What of its box nobody before it in the mesh holds: each element is one rank's own, and
        a tensor without elements the first position's."""
        box, mesh, has_elements = self.box(at), at.mesh, math.prod(self.shape) > 0
        if self.blocks and self.cuts and has_elements:
            return box if box.size else None
        if mesh.cuts:
            # Evenly among those who hold the same blocks.
            ranks = mesh.ranks_with_blocks(self.blocks) if self.blocks else mesh.ranks()
            owner = ranks[min(self.blocks, default=0) % len(ranks)]
            return box if at.rank == owner else None
        cutting = self.axes if has_elements else ()
        others: list[Axis] = [axis for axis in AXES if axis not in cutting]
        if mesh.is_inactive(at.rank) or any(mesh.coordinate(axis, at.rank) for axis in others):
            return None
        return box if box.size or not has_elements else None
