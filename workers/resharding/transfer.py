"""A generation's state from the boxes that its members hold: every old shard goes to its new owners
through one all-to-all per few megabytes, uneven sizes included.

Who gives what to whom is moves.py's; installing what came is the strategy's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.protocol.layout import Box, Position, TensorLayout
from workers.distributed.process_group import AnyGroup
from workers.resharding.memory import ShardMemory
from workers.resharding.moves import COPY, Move
from workers.tensors.local import dtype_of, local, part_of

PIECE_BYTES = 2 * 2**20
PIECES = 32
"""An exchange takes whole tensors, until they have so many bytes or this part of the state: what
is on its way is in memory several times. The same for all, whatever a rank does with old shards."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read from a copy."""

    name: str
    """Of the tensor."""
    box: Box
    """Of the whole tensor."""
    into: Tensor
    """Memory of the box's shape, anywhere and with any strides."""


Read = Callable[[int, list[Wanted]], None]
"""Source, and what to read from it."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the boxes of a state are."""

    held: Sequence[Position]
    owners: Sequence[int]
    """As for `moves_of`."""
    mine: Mapping[int, Mapping[str, Tensor]]
    """Source -> its tensors by name: those that this rank owns."""
    read: Read


def exchange(
    tensors: Sequence[tuple[TensorLayout, list[Move]]],
    sources: Sources,
    to: Position,
    group: AnyGroup,
    memory: ShardMemory,
    *,
    freed: dict[str, Tensor] | None = None,
    begin_piece: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """This rank's box of every tensor, in memory of its own. A collective.

    to: its new position. freed: this rank's live shards, by name, emptied on the way so that nobody
    ever has all of the old and the new. memory: for the new shards, or of those of `freed`.
    begin_piece: called before each piece. Raises what that raises, PeerLost, and what
    `sources.read` raises once all collectives are over.
    """
    # All at first, if they stay: what comes and goes meanwhile leaves holes between them.
    found = memory.take([layout for layout, _ in tensors], to) if freed is None else {}
    wanted: dict[int, list[Wanted]] = {}
    rooms = _Room(memory.device), _Room(memory.device)
    for batch in _batches(tensors):
        begin_piece()
        for layout, _ in batch if freed is not None else ():
            found[layout.name] = memory.take_one(layout, to)
        _exchange_batch(batch, sources, to, group, rooms=rooms, found=found, wanted=wanted)
        if freed is not None:
            memory.drop([local(freed.pop(t.name)) for t, _ in batch if t.name in freed])
    for source, of_source in wanted.items():
        sources.read(source, of_source)
    return found


class _Room:
    """Memory for what is on its way, the same for every batch."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, size_bytes: int) -> Tensor:
        if self._flat.numel() < size_bytes:
            self._flat = self._flat.new_empty(0)  # first: never the old and the new
            self._flat = self._flat.new_empty(size_bytes)
        return self._flat[:size_bytes]


Batch = list[tuple[TensorLayout, list[Move]]]


def _batches(tensors: Sequence[tuple[TensorLayout, list[Move]]]) -> Iterator[Batch]:
    sizes = [dtype_of(t).itemsize * math.prod(t.shape) for t, _ in tensors]
    # A block's tensor is one rank's, of others each has a part.
    pieces = 2 * PIECES if any(t.blocks for t, _ in tensors) else PIECES
    limit = max(PIECE_BYTES, sum(sizes) // pieces)
    batch: Batch = []
    size = 0
    for one, size_bytes in zip(tensors, sizes, strict=True):
        batch.append(one)
        size += size_bytes
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exchange_batch(
    batch: Batch,
    sources: Sources,
    to: Position,
    group: AnyGroup,
    *,
    rooms: tuple[_Room, _Room],
    found: dict[str, Tensor],
    wanted: dict[int, list[Wanted]],
) -> None:
    """rooms: for what is sent and for what is received."""
    me, owners = group.rank(), sources.owners
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size())]
    incoming: list[list[Tensor]] = [[] for _ in range(group.size())]
    for layout, moves in batch:
        name, mine = layout.name, layout.box(to)
        for move in moves:
            owner = owners[move.source]
            if owner == me:
                held = layout.box(sources.held[move.source])
                shard = local(sources.mine[move.source][name])
                piece = part_of(shard, move.box.relative_to(held))
                if move.target != me:
                    outgoing[move.target].append(_as_flat(piece))
                elif layout.is_cut:
                    part_of(found[name], move.box.relative_to(mine)).copy_(piece)
                else:  # in memory of its own size, as `found` may be a cache
                    found[name] = piece.clone()
            elif move.target == me:
                part = part_of(found[name], move.box.relative_to(mine))
                if owner == COPY:
                    wanted.setdefault(move.source, []).append(Wanted(name, move.box, part))
                else:
                    incoming[owner].append(part)
    out_sizes = [sum(part.nbytes for part in of_rank) for of_rank in incoming]
    in_sizes = [sum(piece.numel() for piece in of_rank) for of_rank in outgoing]
    sent, received = rooms[0].take(sum(in_sizes)), rooms[1].take(sum(out_sizes))
    pieces = [piece for of_rank in outgoing for piece in of_rank]
    for flat, piece in zip(sent.split([p.numel() for p in pieces]), pieces, strict=True):
        flat.copy_(piece)
    group.all_to_all_flat(received, sent, out_sizes, in_sizes).wait()
    parts = [part for of_rank in incoming for part in of_rank]
    for flat, part in zip(received.split([p.nbytes for p in parts]), parts, strict=True):
        _fill(part, flat)


def _as_flat(tensor: Tensor) -> Tensor:
    """Its bytes in C order; a copy only where it is not contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def _fill(part: Tensor, flat: Tensor) -> None:
    """The inverse: `flat` may begin at any byte, so it is not looked at as numbers."""
    if part.is_contiguous():
        _as_flat(part).copy_(flat)
    else:
        plain = torch.empty_like(part, memory_format=torch.contiguous_format)
        _as_flat(plain).copy_(flat)
        part.copy_(plain)
