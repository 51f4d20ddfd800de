"""A generation's state from the rows that its members hold: every old shard goes to its new owners
through one all-to-all per few megabytes, uneven sizes included.

Who holds what is known to all before anything moves; installing it is sharded.py's.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.parallel.shards import TensorLayout
from workers.resharding.host_memory import RowMemory
from workers.train_state.tensors import local

PIECE_BYTES = 2 * 2**20
PIECES = 32
"""An exchange takes whole tensors, until they have so many bytes or this part of the state: what
is on its way is in memory several times. The same for all, whatever a rank does with old rows."""


@dataclass(frozen=True, slots=True)
class ShardCoord:
    """Whose rows a member holds: those of `rank` of `mesh`."""

    mesh: Mesh
    rank: int


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of one tensor from one member to another."""

    source: int
    target: int
    rows: range


COPY = -1
"""The owner of a source that no member holds: a copy in peer memory."""


def moves_of(
    kind: TensorLayout,
    held: Sequence[ShardCoord | None],
    new: Mesh,
    owners: Sequence[int] | None = None,
) -> list[Move]:
    """Which source gives which rows of a tensor to whom, each row once; by target and row.

    held: what each source holds. owners: the new rank that has it in memory, or COPY; by default
    source r is rank r. LookupError if nobody holds some row.
    """
    owners = range(len(held)) if owners is None else owners
    holders = [(kind.rows(p.mesh, p.rank), s) for s, p in enumerate(held) if p is not None]
    moves: list[Move] = []
    for target in range(new.world_size):
        wanted = kind.rows(new, target)
        at = wanted.start
        while at < wanted.stop:
            found = [
                (min(rows.stop, wanted.stop), owners[s] == target, owners[s] != COPY, -s)
                for rows, s in holders
                if at in rows
            ]
            if not found:
                raise LookupError(f"nobody holds row {at} of {kind.name}")
            *_, source = max(found)  # the longest stretch, rather one's own, rather a member's
            stop = max(found)[0]
            moves.append(Move(-source, target, range(at, stop)))
            at = stop
    return moves


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the rows of a state are."""

    held: Sequence[ShardCoord]
    owners: Sequence[int]
    """As for `moves_of`."""
    mine: Mapping[int, Mapping[str, Tensor]]
    """Source -> its tensors by name: those that this rank owns."""
    read: "Read"


Read = Callable[[int, list[tuple[TensorLayout, range, Tensor]]], None]
"""Source, and what to read from it: rows of a tensor, and the memory to put them into."""


def exchange(
    kinds: Sequence[TensorLayout],
    plans: Sequence[list[Move]],
    sources: Sources,
    new: Mesh,
    group: AnyGroup,
    device: torch.device,
    memory: RowMemory,
    freed: dict[str, Tensor] | None = None,
    begin_piece: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """This rank's rows under `new` of every tensor, not where any were. A collective.

    plans: the `moves_of` each kind. freed: where this rank's live rows are, by name, emptied on the
    way so that nobody ever has all of the old and the new. memory: for rows on the host, or where
    those of `freed` may be. begin_piece: called before each piece. Raises what that raises,
    PeerLost, and what `sources.read` raises once all collectives are over.
    """
    found: dict[str, Tensor] = {}
    if freed is None:  # all at first, or what comes and goes meanwhile leaves holes between them
        on_host = device.type == "cpu"
        found = memory.take(kinds, new, group.rank()) if on_host else {}
        for kind in kinds:
            if kind.name not in found:
                found[kind.name] = kind.empty(kind.rows(new, group.rank()), device)
    wanted: dict[int, list[tuple[TensorLayout, range, Tensor]]] = {}
    rooms = _Room(device), _Room(device)
    for batch in _batches(kinds):
        begin_piece()
        of_batch = [(kinds[i], plans[i]) for i in batch]
        _exchange_batch(of_batch, sources, new, group, rooms, found, wanted)
        if freed is not None:
            for i in batch:
                rows = freed.pop(kinds[i].name, None)
                if rows is not None:
                    memory.discard(local(rows))
            give_back()
    for source, pieces in wanted.items():
        sources.read(source, pieces)
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


def give_back() -> None:
    """Freed memory goes to the system, where the C library can do that (glibc): it keeps what is
    too small for a mapping of its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _batches(kinds: Sequence[TensorLayout]) -> Iterator[list[int]]:
    sizes = [k.row_bytes * (k.shape[0] if k.is_sharded else 1) for k in kinds]
    limit = max(PIECE_BYTES, sum(sizes) // PIECES)
    batch: list[int] = []
    size = 0
    for i, of_kind in enumerate(sizes):
        batch.append(i)
        size += of_kind
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exchange_batch(
    batch: Sequence[tuple[TensorLayout, list[Move]]],
    sources: Sources,
    new: Mesh,
    group: AnyGroup,
    rooms: tuple[_Room, _Room],
    found: dict[str, Tensor],
    wanted: dict[int, list[tuple[TensorLayout, range, Tensor]]],
) -> None:
    """rooms: for what is sent and for what is received."""
    me, owners = group.rank(), sources.owners
    outgoing: list[list[Tensor]] = [[] for _ in range(new.world_size)]
    incoming: list[list[Tensor]] = [[] for _ in range(new.world_size)]
    for kind, moves in batch:
        rows = kind.rows(new, me)
        if kind.name not in found:
            found[kind.name] = kind.empty(rows, rooms[0].take(0).device)
        target = found[kind.name]
        for move in moves:
            owner = owners[move.source]
            if owner == me:
                place = sources.held[move.source]
                first = kind.rows(place.mesh, place.rank).start
                piece = _rows(kind, sources.mine[move.source][kind.name], move.rows, first)
                if move.target == me:
                    _keep(found, kind, piece, move.rows, rows)
                else:
                    outgoing[move.target].append(_as_flat(piece))
            elif move.target == me:
                part = _rows(kind, target, move.rows, rows.start)
                if owner == COPY:
                    wanted.setdefault(move.source, []).append((kind, move.rows, part))
                else:
                    incoming[owner].append(_as_flat(part))
    out_sizes, in_sizes = _sizes(incoming), _sizes(outgoing)
    sent, received = rooms[0].take(sum(in_sizes)), rooms[1].take(sum(out_sizes))
    for flat, piece in _stretches(sent, outgoing):
        flat.copy_(piece)
    group.all_to_all_flat(received, sent, out_sizes, in_sizes).wait()
    for flat, part in _stretches(received, incoming):
        part.copy_(flat)


def _keep(
    found: dict[str, Tensor], kind: TensorLayout, piece: Tensor, moved: range, rows: range
) -> None:
    """What this rank has itself; a whole tensor in its own size, as it may be a cache."""
    if kind.is_sharded:
        _rows(kind, found[kind.name], moved, rows.start).copy_(piece)
    else:
        found[kind.name] = piece.clone()


def _as_flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _sizes(of_ranks: Sequence[Sequence[Tensor]]) -> list[int]:
    return [sum(piece.numel() for piece in pieces) for pieces in of_ranks]


def _stretches(
    flat: Tensor, of_ranks: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece, rank by rank, and its stretch of `flat`."""
    pieces = [piece for of_rank in of_ranks for piece in of_rank]
    return zip(flat.split([piece.numel() for piece in pieces]), pieces, strict=True)


def _rows(kind: TensorLayout, tensor: Tensor, rows: range, first: int) -> Tensor:
    """`rows` of a tensor whose rows begin at `first`."""
    tensor = local(tensor)
    return tensor[rows.start - first : rows.stop - first] if kind.is_sharded else tensor
