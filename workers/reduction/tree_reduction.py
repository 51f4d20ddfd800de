"""The canonical tree over all ranks: each sends every owner its slice of each of its nodes, owners
fold, then all gather. Piece by piece, so that few are on their way and a backward may go on beside.

Small pieces go to all ranks, who fold them themselves: one collective instead of two, each of which
waits for the slowest rank. Two ranks with a node each let the backend add: a sum of two numbers has
the same bits in either order.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic.protocol.mesh import microbatch_ids
from workers.reduction.tree import (
    Block,
    FlatLayout,
    FlatPart,
    Flats,
    Group,
    Pending,
    TreeFold,
    blocks_of,
    fold_blocks,
)

Piece = tuple[int, int, int]
"""Part of the layout, first element, elements."""

PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""One collective's share of a flat buffer."""
SHARED_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 16}
"""All ranks fold a piece up to this size, however many they are."""
PIECES_IN_FLIGHT = 2
"""Of each kind of collective; every piece on its way takes several times its own memory, but for
that of a pair of ranks. What is not folded when a backward ends is waited for."""


def reduce_tree(
    group: Group, fold: TreeFold, num_microbatches: int, ids: Sequence[range] = ()
) -> Flats:
    """The sum over all ids on every rank: equal bits for every world size. A collective.

    ids: of each rank, ascending; by default as even as can be. The result belongs to the caller,
    who divides it. Raises PeerLost.
    """
    if group.size() == 1:
        return fold.release_root()
    return TreeReduction(group, fold, num_microbatches, ids).finish()


class TreeReduction:
    """`reduce_tree` in pieces. All ranks launch them in one order, whenever each can: the parts of
    the layout as they come, each from its end, as a backward's gradients do.

    The sum takes the place of this rank's first node.
    """

    def __init__(
        self, group: Group, fold: TreeFold, num_microbatches: int, ids: Sequence[range] = ()
    ) -> None:
        """Before `finish` only the pieces that were given to `launch` need be folded. ids: as
        `reduce_tree` takes them."""
        assert num_microbatches == fold.num_microbatches
        world_size, self._group = group.size(), group
        sums = fold.sums()
        self._blocks = [
            blocks_of(of_rank, num_microbatches)
            for of_rank in ids
            or [microbatch_ids(num_microbatches, world_size, rank) for rank in range(world_size)]
        ]
        assert list(self._blocks[group.rank()]) == [block for block, _ in sums]
        self._partials = [flats for _, flats in sums]
        self._result = fold.release_first()
        self._is_pair = [len(of_rank) for of_rank in self._blocks] == [1, 1]
        self.pieces = pieces_of(fold.layout, world_size)
        self._num_launched = 0
        self._exchanges: deque[_Exchange | _Sharing | _Pair] = deque()
        self._gathering: deque[Pending] = deque()

    def launch(self, count: int) -> None:
        """Of the first `count` pieces, those that need not wait for others. Raises PeerLost."""
        while self._num_launched < count and self._has_room():
            self._launch_next()

    def finish(self) -> Flats:
        """Launch the rest and wait. Raises PeerLost."""
        while self._num_launched < len(self.pieces):
            self._launch_next()
        while self._exchanges:
            self._fold_next()
        while self._gathering:
            self._gathering.popleft().wait()
        return self._result

    def _has_room(self) -> bool:
        exchanges, gathering = self._exchanges, self._gathering
        return (
            self._is_pair
            or len(exchanges) < PIECES_IN_FLIGHT
            or (
                exchanges[0].pending.is_settled
                and (len(gathering) < PIECES_IN_FLIGHT or gathering[0].is_settled)
            )
        )

    def _launch_next(self) -> None:
        if not self._is_pair and len(self._exchanges) == PIECES_IN_FLIGHT:
            self._fold_next()
        part, at, size = self.pieces[self._num_launched]
        partials = [flats[part][at : at + size] for flats in self._partials]
        result = self._result[part][at : at + size]
        if self._is_pair:
            kind = _Pair
        elif _is_shared(self._blocks, size, result.device.type):
            kind = _Sharing
        else:
            kind = _Exchange
        self._exchanges.append(kind(self._group, self._blocks, partials, result))
        self._num_launched += 1

    def _fold_next(self) -> None:
        if len(self._gathering) == PIECES_IN_FLIGHT:
            self._gathering.popleft().wait()
        gathering = self._exchanges.popleft().fold()
        if gathering is not None:
            self._gathering.append(gathering)


class _Exchange:
    """One piece of a flat buffer on its way: every rank's blocks to their owners and back."""

    @torch.no_grad()
    def __init__(
        self, group: Group, blocks: list[tuple[Block, ...]], partials: list[Tensor], result: Tensor
    ) -> None:
        self._group, self._blocks, self._result = group, blocks, result
        self._share = share = result.numel() // group.size()
        received = [len(b) * share for b in blocks]
        self._received = result.new_empty(sum(received))
        if len(partials) > 1:
            by_owner = [p.view(group.size(), share) for p in partials]
            self._sent = torch.stack(by_owner, dim=1).view(-1)
        else:
            self._sent = partials[0]
        sent = [len(partials) * share] * group.size()
        self.pending = group.all_to_all_flat(self._received, self._sent, received, sent)

    @torch.no_grad()
    def fold(self) -> Pending:
        """What gathers the result. Raises PeerLost. What was sent is free from here on, the place
        of the result included."""
        self.pending.wait()
        blocks = (block for of_rank in self._blocks for block in of_rank)
        folded = fold_blocks(zip(blocks, self._received.split(self._share), strict=True))
        return self._group.all_gather_flat(self._result, folded)


class _Sharing:
    """One piece of a flat buffer on its way: every rank's blocks to all, who fold them."""

    @torch.no_grad()
    def __init__(
        self, group: Group, blocks: list[tuple[Block, ...]], partials: list[Tensor], result: Tensor
    ) -> None:
        self._blocks, self._result = blocks, result
        self._sent = partials[0] if len(partials) == 1 else torch.cat(partials)
        self._received = result.new_empty(len(blocks) * self._sent.numel())
        self.pending = group.all_gather_flat(self._received, self._sent)

    @torch.no_grad()
    def fold(self) -> None:
        """Raises PeerLost. What was sent is free from here on."""
        self.pending.wait()
        received = self._received.split(self._result.numel())
        blocks = (block for of_rank in self._blocks for block in of_rank)
        self._result.copy_(fold_blocks(zip(blocks, received, strict=True)))


class _Pair:
    """One piece of a flat buffer on its way, of two ranks that have one block each."""

    def __init__(
        self, group: Group, blocks: list[tuple[Block, ...]], partials: list[Tensor], result: Tensor
    ) -> None:
        """partials: one, which is where the result goes."""
        (partial,) = partials
        assert partial.data_ptr() == result.data_ptr()
        self.pending = group.all_reduce(result)

    def fold(self) -> None:
        """Raises PeerLost."""
        self.pending.wait()


def _is_shared(blocks: list[tuple[Block, ...]], size: int, device_type: str) -> bool:
    """Whether every rank folds a piece alone; the same on all ranks."""
    is_small = size <= SHARED_ELEMENTS.get(device_type, 0)
    return is_small and len({len(of_rank) for of_rank in blocks}) == 1


def pieces_of(layout: FlatLayout, world_size: int) -> list[Piece]:
    """In the order of launching. Each is a multiple of the world size."""
    return [
        piece
        for number, part in enumerate(layout.parts)
        for piece in _cut(number, part, world_size)
    ]


def _cut(number: int, part: FlatPart, world_size: int) -> list[Piece]:
    limit = PIECE_ELEMENTS.get(part.device.type, 1 << 22)
    size = max(limit // world_size, 1) * world_size
    starts = reversed(range(0, part.capacity, size))
    return [(number, at, min(size, part.capacity - at)) for at in starts]
