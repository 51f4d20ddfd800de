"""Which boxes of a tensor go from whom to whom, when those who hold it are others than before.

All ranks plan alike, before anything moves; the moving is transfer.py's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic.protocol.layout import Box, Position, TensorLayout
from elastic.protocol.mesh import Mesh
from workers.tensors.local import dtype_of

COPY = -1
"""The owner of a source that no member holds: a copy in peer memory."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of one tensor from a source to a rank."""

    source: int
    target: int
    box: Box
    """Of the whole tensor."""


def moves_of(
    tensor: TensorLayout,
    held: Sequence[Position | None],
    new: Mesh,
    owners: Sequence[int] | None = None,
) -> list[Move]:
    """Which source gives which box of a tensor to whom, each element once; by target and start.

    held: what each source holds. owners: the new rank that has it in memory, or COPY; by default
    source r is rank r. LookupError if nobody holds some element.
    """
    owners = range(len(held)) if owners is None else owners
    boxes = [(tensor.box(at), s) for s, at in enumerate(held) if at is not None]
    moves: list[Move] = []
    for target in range(new.world_size):
        left = [tensor.box(Position(new, target))]
        while left:
            wanted = left.pop()
            found: list[tuple[int, bool, bool, int, Box]] = []
            for box, source in boxes:
                common = box.intersection(wanted)
                if common is not None and common.start == wanted.start:
                    is_own, is_members = owners[source] == target, owners[source] != COPY
                    found.append((common.size, is_own, is_members, -source, common))
            if not found and wanted.size:
                raise LookupError(f"nobody holds {wanted} of {tensor.name}")
            if found:
                # The largest, rather one's own, rather a member's.
                *_, source, common = max(found, key=lambda one: one[:4])
                moves.append(Move(-source, target, common))
                left += reversed(wanted.without(common))
    return moves


def plan(
    tensors: Sequence[TensorLayout],
    held: Sequence[Position],
    new: Mesh,
    owners: Sequence[int],
) -> list[list[Move]]:
    """The moves of each tensor; those that are alike are planned once. Raises LookupError."""
    known: dict[object, list[Move]] = {}
    for tensor in tensors:
        if _kind(tensor) not in known:
            known[_kind(tensor)] = moves_of(tensor, held, new, owners)
    return [known[_kind(tensor)] for tensor in tensors]


def gentle_order(
    tensors: Sequence[TensorLayout],
    held: Sequence[Position],
    new: Mesh,
    owners: Sequence[int],
) -> list[int]:
    """In which the tensors are to be exchanged, by number, so that no rank has much more on the way
    than before or afterwards. Where ranks hold blocks, one gets the last ones and gives the first
    ones away while another does the opposite: always the block that is the least for everybody.

    held, owners: as for `plan`.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(tensor.blocks, []).append(number)
    if len(groups) < 3:
        return list(range(len(tensors)))
    before: list[Position | None] = [None] * new.world_size
    for at, owner in zip(held, owners, strict=True):
        if owner != COPY and before[owner] is None:
            before[owner] = at
    after = [Position(new, rank) for rank in range(new.world_size)]
    given, taken = (_bytes_of(tensors, groups.values(), places) for places in (before, after))
    has, left, order = given.sum(0), list(groups.values()), list[int]()
    most = np.maximum(np.maximum(has, taken.sum(0)), 1)
    while left:
        highest = ((has + taken) / most).max(1)
        rest = ((taken - given) / most).sum(1)
        index = int(np.lexsort((rest, highest))[0])
        has = has + taken[index] - given[index]
        given, taken = np.delete(given, index, 0), np.delete(taken, index, 0)
        order += left.pop(index)
    return order


def _bytes_of(
    tensors: Sequence[TensorLayout],
    groups: Iterable[Sequence[int]],
    places: Sequence[Position | None],
) -> npt.NDArray[np.float64]:
    """By group and place."""
    known: dict[object, npt.NDArray[np.float64]] = {}
    found: list[npt.NDArray[np.float64]] = []
    for group in groups:
        total = np.zeros(len(places))
        for tensor in (tensors[number] for number in group):
            kind = _kind(tensor)
            if kind not in known:
                known[kind] = np.array([tensor.box(at).size if at else 0 for at in places], float)
            total = total + known[kind] * dtype_of(tensor).itemsize
        found.append(total)
    return np.array(found)


def _kind(tensor: TensorLayout) -> object:
    return tensor.shape, tensor.cuts, tensor.blocks


def moved_bytes(
    tensors: Sequence[TensorLayout], plans: Sequence[list[Move]], owners: Sequence[int]
) -> int:
    """What goes from one rank, or a holder, to another."""
    total = 0
    for tensor, moves in zip(tensors, plans, strict=True):
        elements = sum(m.box.size for m in moves if owners[m.source] != m.target)
        total += elements * dtype_of(tensor).itemsize
    return total
