"""Which boxes of a tensor go from whom to whom, when those who hold it are others than before.

All ranks plan alike, before anything moves; the moving is transfer.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
