"""The canonical tree over all ranks: each sends every owner its slice of each of its nodes, owners
fold, then all gather. Piece by piece, so that few are on their way and a backward may go on beside.
"""

from collections import deque

import torch
from torch import Tensor

from elastic.protocol.membership import microbatch_ids
from workers.reduction.tree import Block, Flats, Group, Pending, TreeFold, blocks_of, fold_blocks

PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""One collective's share of a flat buffer."""
PIECES_IN_FLIGHT = 3
"""Of each kind of collective; every piece on its way takes several times its own memory."""


def reduce_tree(group: Group, fold: TreeFold, num_microbatches: int) -> Flats:
    """The sum over all ids on every rank: equal bits for every world size. A collective.

    The result belongs to the caller, who divides it. Raises PeerLost.
    """
    if group.size() == 1:
        return fold.release_root()
    return TreeReduction(group, fold, num_microbatches).finish()


class TreeReduction:
    """`reduce_tree` in pieces. All ranks launch them in one order, whenever each can: the parts of
    the layout as they come, each from its end, as a backward's gradients do.

    The sum takes the place of this rank's first node.
    """

    def __init__(self, group: Group, fold: TreeFold, num_microbatches: int) -> None:
        """Before `finish` only the pieces that were given to `launch` need be folded."""
        assert num_microbatches == fold.num_microbatches
        world_size, self._group = group.size(), group
        sums = fold.sums()
        self._blocks = [
            blocks_of(microbatch_ids(num_microbatches, world_size, rank), num_microbatches)
            for rank in range(world_size)
        ]
        assert list(self._blocks[group.rank()]) == [block for block, _ in sums]
        self._partials = [flats for _, flats in sums]
        self._result = fold.release_first()
        self.pieces = [
            (part, at, size)
            for part, flat in enumerate(self._result)
            for at, size in _pieces(flat, world_size)
        ]
        """(part, first element, elements), in the order of launching."""
        self._num_launched = 0
        self._exchanges: deque[_Exchange] = deque()
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
            self._gather_next()
        while self._gathering:
            self._gathering.popleft().wait()
        return self._result

    def _has_room(self) -> bool:
        exchanges, gathering = self._exchanges, self._gathering
        return len(exchanges) < PIECES_IN_FLIGHT or (
            exchanges[0].pending.is_settled
            and (len(gathering) < PIECES_IN_FLIGHT or gathering[0].is_settled)
        )

    def _launch_next(self) -> None:
        if len(self._exchanges) == PIECES_IN_FLIGHT:
            self._gather_next()
        part, at, size = self.pieces[self._num_launched]
        partials = [flats[part][at : at + size] for flats in self._partials]
        result = self._result[part][at : at + size]
        self._exchanges.append(_Exchange(self._group, self._blocks, partials, result))
        self._num_launched += 1

    def _gather_next(self) -> None:
        if len(self._gathering) == PIECES_IN_FLIGHT:
            self._gathering.popleft().wait()
        self._gathering.append(self._exchanges.popleft().fold_and_gather())


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
    def fold_and_gather(self) -> Pending:
        """Raises PeerLost. What was sent is free from here on, the place of the result included."""
        self.pending.wait()
        blocks = (block for of_rank in self._blocks for block in of_rank)
        folded = fold_blocks(zip(blocks, self._received.split(self._share), strict=True))
        return self._group.all_gather_flat(self._result, folded)


def _pieces(flat: Tensor, world_size: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a flat buffer, each a multiple of the world size."""
    limit = PIECE_ELEMENTS.get(flat.device.type, 1 << 22)
    size = max(limit // world_size, 1) * world_size
    return [(at, min(size, flat.numel() - at)) for at in range(0, flat.numel(), size)][::-1]
