"""The canonical tree over micro-batch ids, which does not see the world size.

Ids 0..V-1 are the leaves of a balanced binary tree, padded to a power of two with absent leaves;
a node with one child is that child. Whoever adds, and where, the additions are the same.
Gradient buckets of the fast mode are in buckets.py; process groups in distributed/process_group.py.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import microbatch_ids
from workers.train_state.strides import dense_strides, plain_strides

PIECE_ELEMENTS = 1 << 22  # one collective's share of a flat buffer, so that folding overlaps
PIECES_IN_FLIGHT = 3
"""Of each kind of collective; every piece on its way takes several times its own memory."""

Flats = list[Tensor]  # one flat buffer per part of a FlatLayout


class Pending(Protocol):
    """A collective in flight; `wait` raises if a member is lost."""

    def wait(self) -> None: ...


class Group(Protocol):
    """What a reduction needs of the process group of one generation."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Pending: ...
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Pending: ...
    def all_reduce(self, tensor: Tensor) -> Pending: ...


@dataclass(frozen=True, slots=True)
class Block:
    """The node of the tree over ids index * 2**level .. (index + 1) * 2**level."""

    level: int
    index: int

    def is_left_sibling_of(self, other: "Block") -> bool:
        return self.level == other.level and not self.index & 1 and other.index == self.index + 1

    @property
    def parent(self) -> "Block":
        return Block(self.level + 1, self.index >> 1)


def blocks_of(ids: range, num_microbatches: int) -> tuple[Block, ...]:
    """The largest nodes of the tree that hold exactly these ids (and absent leaves)."""
    end = ids.stop if ids.stop < num_microbatches else 1 << (num_microbatches - 1).bit_length()
    blocks: list[Block] = []
    start = ids.start
    while start < ids.stop:
        level = (end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        blocks.append(Block(level, start >> level))
        start += 1 << level
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class FlatPart:
    """The leaves of one dtype, one behind the other."""

    dtype: torch.dtype
    device: torch.device
    leaves: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    """Elements in use."""
    capacity: int
    """Elements allocated: the next multiple of the world size."""


class FlatLayout:
    """Where the tensors of one micro-batch (gradients, then floating buffers) stand when flat.

    A gradient lies there in its parameter's order (workers/train_state/strides.py), a buffer row
    by row. Half precision gradients are added in float32. Buffers are added in float64, where the
    mean of equal float32 values is that value: a buffer that nothing changed does not drift.
    """

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        world_size: int = 1,
    ) -> None:
        buffers = buffers or {}
        self.names = (*gradients, *buffers)
        self.shapes = tuple(t.shape for t in (*gradients.values(), *buffers.values()))
        self._strides = (
            *(dense_strides(t) for t in gradients.values()),
            *(plain_strides(t.shape) for t in buffers.values()),
        )
        self.num_gradients = len(gradients)
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, t in enumerate(gradients.values()):
            by_kind.setdefault((_sum_dtype(t.dtype), t.device), []).append(i)
        for i, t in enumerate(buffers.values(), self.num_gradients):
            dtype = torch.complex128 if t.is_complex() else torch.float64
            by_kind.setdefault((dtype, t.device), []).append(i)
        self.parts = tuple(
            self._part(dtype, device, leaves, world_size)
            for (dtype, device), leaves in by_kind.items()
        )

    def _part(
        self, dtype: torch.dtype, device: torch.device, leaves: list[int], world_size: int
    ) -> FlatPart:
        ends = np.cumsum([self.shapes[i].numel() for i in leaves]).tolist()
        capacity = -(-ends[-1] // world_size) * world_size
        return FlatPart(dtype, device, tuple(leaves), (0, *ends[:-1]), ends[-1], capacity)

    def empty(self) -> Flats:
        """Fresh flat buffers; only the padding behind `size` is defined (zero)."""
        flats = [torch.empty(p.capacity, dtype=p.dtype, device=p.device) for p in self.parts]
        for part, flat in zip(self.parts, flats, strict=True):
            flat[part.size :].zero_()
        return flats

    def views(self, flats: Flats) -> list[Tensor]:
        """Tensors of the leaves' shapes that share the flat buffers' memory, in leaf order."""
        views: list[Tensor] = [torch.empty(0)] * len(self.names)
        for part, flat in zip(self.parts, flats, strict=True):
            sizes = [self.shapes[i].numel() for i in part.leaves]
            for i, piece in zip(part.leaves, flat[: part.size].split(sizes), strict=True):
                views[i] = piece.as_strided(self.shapes[i], self._strides[i])
        return views


@dataclass(frozen=True, slots=True)
class _Partial:
    """The sum over one block, and its leaves as views."""

    block: Block
    flats: Flats
    views: list[Tensor]


class TreeFold:
    """Folds one rank's micro-batches, in id order, into the nodes of `blocks_of(ids)`.

    About log2(number of ids) + 1 flat buffers are kept and used again in the next step. One fold
    per generation: a collective that a generation abandoned may still write into its buffers.
    """

    def __init__(self, layout: FlatLayout, ids: range, num_microbatches: int) -> None:
        self.layout = layout
        self.ids = ids
        self.num_microbatches = num_microbatches
        self._stack: list[_Partial] = []
        self._spare: list[tuple[Flats, list[Tensor]]] = []
        self._next_id = ids.start

    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        while self._stack:
            self._put_back(self._stack.pop())
        self._next_id = self.ids.start

    @torch.no_grad()
    def add(self, microbatch_id: int, leaves: Sequence[Tensor | None]) -> None:
        """Fold one micro-batch; a leaf that is None counts as zero. The leaves are not kept."""
        assert microbatch_id == self._next_id, f"expected id {self._next_id}, not {microbatch_id}"
        self._refuse_sparse(leaves)
        self._next_id += 1
        block = Block(0, microbatch_id)
        if self._stack and self._stack[-1].block.is_left_sibling_of(block):
            left = self._stack.pop()
            _add_leaves(left.views, leaves)
            self._push(_Partial(block.parent, left.flats, left.views))
        else:
            flats, views = self._take()
            _copy_leaves(views, leaves)
            self._push(_Partial(block, flats, views))
        if self._next_id == self.ids.stop:
            self._close()

    def sums(self) -> list[tuple[Block, Flats]]:
        """The finished nodes, ascending; valid until the next `begin`."""
        assert self._next_id == self.ids.stop, f"ids from {self._next_id} on are missing"
        return [(partial.block, partial.flats) for partial in self._stack]

    def release_root(self) -> Flats:
        """The sum over all ids where this rank computes them all; the caller owns it now."""
        assert len(self._stack) == 1
        return self._stack.pop().flats

    def recycle(self, flats: Flats) -> None:
        """Optional: give back flat buffers that this fold or `reduce_tree` handed out."""
        self._spare.append((flats, self.layout.views(flats)))

    def new_flats(self) -> Flats:
        return self._take()[0]

    def _push(self, partial: _Partial) -> None:
        while self._stack and self._stack[-1].block.is_left_sibling_of(partial.block):
            left = self._stack.pop()
            for total, addend in zip(left.flats, partial.flats, strict=True):
                total.add_(addend)
            self._put_back(partial)
            partial = _Partial(left.block.parent, left.flats, left.views)
        self._stack.append(partial)

    def _close(self) -> None:
        """Merge what only absent leaves keep apart."""
        last = blocks_of(self.ids, self.num_microbatches)[-1]
        while self._stack[-1].block != last:
            partial = self._stack.pop()
            self._push(_Partial(partial.block.parent, partial.flats, partial.views))

    def _take(self) -> tuple[Flats, list[Tensor]]:
        if self._spare:
            return self._spare.pop()
        flats = self.layout.empty()
        return flats, self.layout.views(flats)

    def _put_back(self, partial: _Partial) -> None:
        self._spare.append((partial.flats, partial.views))

    def _refuse_sparse(self, leaves: Sequence[Tensor | None]) -> None:
        for name, leaf in zip(self.layout.names, leaves, strict=True):
            if leaf is not None and leaf.layout != torch.strided:
                raise WrongInput(
                    f"parameter {name!r} has a sparse gradient, which cannot be reduced; "
                    "build its layer with sparse=False"
                )


def reduce_tree(group: Group, fold: TreeFold, num_microbatches: int) -> Flats:
    """The sum over all ids on every rank: equal bits for every world size. A collective.

    Every rank sends each owner its slice of every block, owners fold, then all gather. The result
    belongs to the caller, who divides it.
    """
    assert num_microbatches == fold.num_microbatches
    sums, world_size = fold.sums(), group.world_size
    if world_size == 1:
        return fold.release_root()
    blocks = [
        blocks_of(microbatch_ids(num_microbatches, world_size, rank), num_microbatches)
        for rank in range(world_size)
    ]
    assert list(blocks[group.rank]) == [block for block, _ in sums]
    result = fold.new_flats()
    exchanges: deque[_Exchange] = deque()
    gathering: deque[Pending] = deque()
    for part in range(len(result)):
        for at, size in _pieces(result[part].numel(), world_size):
            if len(exchanges) == PIECES_IN_FLIGHT:
                gathering.append(exchanges.popleft().fold_and_gather())
            if len(gathering) == PIECES_IN_FLIGHT:
                gathering.popleft().wait()
            partials = [flats[part][at : at + size] for _, flats in sums]
            exchanges.append(_Exchange(group, blocks, partials, result[part][at : at + size]))
    gathering.extend(exchange.fold_and_gather() for exchange in exchanges)
    for pending in gathering:
        pending.wait()
    return result


class _Exchange:
    """One piece of a flat buffer on its way: every rank's blocks to their owners and back."""

    def __init__(
        self, group: Group, blocks: list[tuple[Block, ...]], partials: list[Tensor], result: Tensor
    ) -> None:
        self._group, self._blocks, self._result = group, blocks, result
        share = result.numel() // group.world_size
        whole = result.new_empty(sum(len(b) for b in blocks) * share)
        self._received = whole.split([len(b) * share for b in blocks])
        self._sent = [
            torch.cat([p[at : at + share] for p in partials])
            if len(partials) > 1
            else partials[0][at : at + share]
            for at in range(0, result.numel(), share)
        ]
        self._share = share
        self._pending = group.all_to_all(list(self._received), self._sent)

    def fold_and_gather(self) -> Pending:
        self._pending.wait()
        slices = (
            (block, part)
            for blocks, received in zip(self._blocks, self._received, strict=True)
            for block, part in zip(blocks, received.split(self._share), strict=True)
        )
        return self._group.all_gather(list(self._result.split(self._share)), fold_blocks(slices))


class CarryStack:
    """Folds leaves, each a few tensors, in id order; a missing id counts as zeros."""

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self.begin()

    def begin(self) -> None:
        self._stack: list[tuple[Block, list[Tensor]]] = []
        self._next_id = 0

    @torch.no_grad()
    def push(self, microbatch_id: int, leaf: Sequence[Tensor]) -> None:
        """The leaf is not kept."""
        while self._next_id < microbatch_id:
            self._push(Block(0, self._next_id), [torch.zeros_like(t) for t in leaf])
            self._next_id += 1
        self._push(Block(0, microbatch_id), leaf)
        self._next_id += 1

    def root(self) -> list[Tensor] | None:
        """The sum over all ids, which the caller owns now; None if nothing was pushed."""
        if not self._stack:
            return None
        if self._next_id < self._num_microbatches:
            zeros = [torch.zeros_like(t) for t in self._stack[0][1]]
            self.push(self._num_microbatches - 1, zeros)
        while len(self._stack) > 1:  # only absent leaves follow the last block
            block, tensors = self._stack.pop()
            self._push(block.parent, tensors)
        return self._stack.pop()[1]

    def _push(self, block: Block, tensors: Sequence[Tensor]) -> None:
        is_new = True
        while self._stack and self._stack[-1][0].is_left_sibling_of(block):
            left, totals = self._stack.pop()
            torch._foreach_add_(totals, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
            block, tensors, is_new = left.parent, totals, False
        self._stack.append((block, [t.clone() for t in tensors] if is_new else list(tensors)))


def fold_blocks(slices: Iterable[tuple[Block, Tensor]]) -> Tensor:
    """The root from blocks that tile the tree, in id order; adds in place."""
    stack: list[tuple[Block, Tensor]] = []

    def push(block: Block, tensor: Tensor) -> None:
        while stack and stack[-1][0].is_left_sibling_of(block):
            left, total = stack.pop()
            block, tensor = left.parent, total.add_(tensor)
        stack.append((block, tensor))

    for block, tensor in slices:
        push(block, tensor)
    while len(stack) > 1:  # only absent leaves follow the last block: it stands for its parent
        block, tensor = stack.pop()
        push(block.parent, tensor)
    return stack[0][1]


def fold_scalars(values: ArrayLike) -> float:
    """The sum of one number per id, through the same tree, in float64."""
    level = np.asarray(values, dtype=np.float64)
    assert level.size, "there is nothing to fold"
    while level.size > 1:
        pairs = level[0 : level.size // 2 * 2 : 2] + level[1::2]
        level = np.concatenate([pairs, level[-1:]]) if level.size % 2 else pairs
    return float(level[0])


def _pieces(capacity: int, world_size: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a flat buffer, each a multiple of the world size."""
    size = max(PIECE_ELEMENTS // world_size, 1) * world_size
    return [(at, min(size, capacity - at)) for at in range(0, capacity, size)]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _copy_leaves(views: list[Tensor], leaves: Sequence[Tensor | None]) -> None:
    if any(leaf is None for leaf in leaves):
        for view, leaf in zip(views, leaves, strict=True):
            if leaf is None:
                view.zero_()
            else:
                view.copy_(leaf)
    elif views:
        present = [leaf for leaf in leaves if leaf is not None]
        torch._foreach_copy_(views, present)  # pyright: ignore[reportPrivateImportUsage]


def _add_leaves(views: list[Tensor], leaves: Sequence[Tensor | None]) -> None:
    if any(leaf is None for leaf in leaves):
        for view, leaf in zip(views, leaves, strict=True):
            view.add_(0.0 if leaf is None else leaf)  # adding 0 turns -0 into 0, as on other ranks
    elif views:
        present = [leaf for leaf in leaves if leaf is not None]
        torch._foreach_add_(views, present)  # pyright: ignore[reportPrivateImportUsage]
