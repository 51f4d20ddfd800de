"""The canonical tree over micro-batch ids, which does not see the world size.

Ids 0..V-1 are the leaves of a balanced binary tree, padded to a power of two with absent leaves;
a node with one child is that child. Whoever adds, and where, the additions are the same.
How the nodes of several ranks become one is in tree_reduction.py; gradient buckets of the fast mode
are in fast.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from elastic.protocol.errors import WrongInput
from workers.tensors.strides import dense_strides, plain_strides
from workers.torch_private.tensors import add_all_, copy_all_

Sum = TypeVar("Sum")
Flats = list[Tensor]  # one flat buffer per part of a FlatLayout


class Pending(Protocol):
    """A collective in flight; `wait` raises if a member is lost."""

    def wait(self) -> None: ...
    @property
    def is_settled(self) -> bool:
        """It is over: `wait` would not block."""
        ...


class Group(Protocol):
    """What a reduction needs of the process group of one generation."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Pending: ...
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Pending: ...
    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Pending: ...
    def all_to_all_flat(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> Pending: ...
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

    A gradient lies there in its parameter's order (workers/tensors/strides.py), a buffer row
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

    def leaves_in(self, pieces: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """Of each leaf the pieces (part, first element, elements) that it has elements in."""
        found: list[list[int]] = [[] for _ in self.names]
        for number, (part_number, at, size) in enumerate(pieces):
            part = self.parts[part_number]
            first = bisect_right(part.offsets, at) - 1
            for leaf, offset in zip(part.leaves[first:], part.offsets[first:], strict=True):
                if offset >= at + size:
                    break
                found[leaf].append(number)
        return found

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
        self.next_id = ids.start

    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        while self._stack:
            self._put_back(self._stack.pop())
        self.next_id = self.ids.start

    @torch.no_grad()
    def add(self, microbatch_id: int, leaves: Sequence[Tensor | None]) -> None:
        """Fold one micro-batch; a leaf that is None counts as zero. The leaves are not kept."""
        assert microbatch_id == self.next_id, f"expected id {self.next_id}, not {microbatch_id}"
        self._refuse_sparse(leaves)
        self.next_id += 1
        block = Block(0, microbatch_id)
        if self._stack and self._stack[-1].block.is_left_sibling_of(block):
            left = self._stack.pop()
            _add_leaves(left.views, leaves)
            self._push(_Partial(block.parent, left.flats, left.views), self._add_up)
        else:
            flats, views = self._take()
            _copy_leaves(views, leaves)
            self._push(_Partial(block, flats, views), self._add_up)
        if self.next_id == self.ids.stop:
            self._close(self._add_up)

    def add_slowly(self, microbatch_id: int) -> "Arriving":
        """Fold one micro-batch while its leaves arrive: what `sums` gives is complete where the
        returned value has folded it. It is to be closed before the next micro-batch."""
        assert microbatch_id == self.next_id, f"expected id {self.next_id}, not {microbatch_id}"
        self.next_id += 1
        block, is_sum = Block(0, microbatch_id), False
        if self._stack and self._stack[-1].block.is_left_sibling_of(block):
            left, is_sum = self._stack.pop(), True
            partial = _Partial(block.parent, left.flats, left.views)
        else:
            partial = _Partial(block, *self._take())
        merges: list[tuple[_Partial, _Partial]] = []
        merge = lambda left, right: merges.append((left, right))  # noqa: E731
        self._push(partial, merge)
        if self.next_id == self.ids.stop:
            self._close(merge)
        return Arriving(self, partial.views, is_sum, merges)

    def sums(self) -> list[tuple[Block, Flats]]:
        """The finished nodes, ascending; valid until the next `begin`."""
        assert self.next_id == self.ids.stop, f"ids from {self.next_id} on are missing"
        return [(partial.block, partial.flats) for partial in self._stack]

    def release_root(self) -> Flats:
        """The sum over all ids where this rank computes them all; the caller owns it now."""
        assert len(self._stack) == 1
        return self._stack.pop().flats

    def release_first(self) -> Flats:
        """The flat buffers of the first node, which the caller owns now: what all ranks sum up may
        take its place, piece by piece."""
        return self._stack.pop(0).flats

    def recycle(self, flats: Flats, views: list[Tensor]) -> None:
        """Optional: give back flat buffers that this fold handed out, and their views."""
        self._spare.append((flats, views))

    def _push(self, partial: _Partial, merge: Callable[[_Partial, _Partial], None]) -> None:
        while self._stack and self._stack[-1].block.is_left_sibling_of(partial.block):
            left = self._stack.pop()
            merge(left, partial)
            partial = _Partial(left.block.parent, left.flats, left.views)
        self._stack.append(partial)

    def _add_up(self, left: _Partial, right: _Partial) -> None:
        for total, addend in zip(left.flats, right.flats, strict=True):
            total.add_(addend)
        self._put_back(right)

    def _close(self, merge: Callable[[_Partial, _Partial], None]) -> None:
        """Merge what only absent leaves keep apart."""
        last = blocks_of(self.ids, self.num_microbatches)[-1]
        while self._stack[-1].block != last:
            partial = self._stack.pop()
            self._push(_Partial(partial.block.parent, partial.flats, partial.views), merge)

    def _take(self) -> tuple[Flats, list[Tensor]]:
        if self._spare:
            return self._spare.pop()
        flats = self.layout.empty()
        return flats, self.layout.views(flats)

    def _put_back(self, partial: _Partial) -> None:
        self.recycle(partial.flats, partial.views)

    def _refuse_sparse(self, leaves: Sequence[Tensor | None]) -> None:
        for name, leaf in zip(self.layout.names, leaves, strict=True):
            refuse_sparse(name, leaf)


class Arriving:
    """A micro-batch on its way into a fold: `add` its leaves, each once, in any order; `fold` the
    stretches whose leaves are there, or all at once. The additions are those of `TreeFold.add`."""

    def __init__(
        self,
        fold: TreeFold,
        views: list[Tensor],
        is_sum: bool,
        merges: list[tuple[_Partial, _Partial]],
    ) -> None:
        self._fold, self._views, self._is_sum, self._merges = fold, views, is_sum, merges

    @torch.no_grad()
    def add(self, indices: Sequence[int], leaves: Sequence[Tensor | None]) -> None:
        """A leaf that is None counts as zero. Leaves are not kept. WrongInput for a sparse one."""
        for i, leaf in zip(indices, leaves, strict=True):
            refuse_sparse(self._fold.layout.names[i], leaf)
        views = [self._views[i] for i in indices]
        (_add_leaves if self._is_sum else _copy_leaves)(views, leaves)

    @torch.no_grad()
    def fold(self, part: int, at: int, size: int) -> None:
        """Complete this stretch of a flat buffer in every node."""
        for left, right in self._merges:
            left.flats[part][at : at + size].add_(right.flats[part][at : at + size])

    def fold_all(self) -> None:
        for part, flat in enumerate(self._fold.layout.parts):
            self.fold(part, 0, flat.capacity)

    def close(self) -> None:
        """Every stretch is folded: the buffers that were added may serve again."""
        for _, right in self._merges:
            self._fold.recycle(right.flats, right.views)


class CarryStack:
    """Folds leaves, each a few tensors, in id order; a missing id counts as zeros."""

    def __init__(self, num_microbatches: int, *, owns_leaves: bool = False) -> None:
        """owns_leaves: nobody else may have them, and sums take their memory. Otherwise no leaf is
        kept."""
        self._num_microbatches, self._owns_leaves = num_microbatches, owns_leaves
        self.begin()

    def begin(self) -> None:
        self._stack: list[tuple[Block, list[Tensor]]] = []
        self.next_id = 0

    @property
    def sibling(self) -> list[Tensor] | None:
        """The leaf that the next one is added to before any other; None if it comes first."""
        if self._stack and self._stack[-1][0].is_left_sibling_of(Block(0, self.next_id)):
            return self._stack[-1][1]
        return None

    @torch.no_grad()
    def push(self, microbatch_id: int, leaf: Sequence[Tensor]) -> None:
        """A tensor that is its `sibling`'s own has been added to it."""
        while self.next_id < microbatch_id:
            self._push([torch.zeros_like(t) for t in leaf])
        self._push(leaf)

    def root(self) -> list[Tensor] | None:
        """The sum over all ids, which the caller owns now; None if nothing was pushed."""
        if not self._stack:
            return None
        if self.next_id < self._num_microbatches:
            zeros = [torch.zeros_like(t) for t in self._stack[0][1]]
            self.push(self._num_microbatches - 1, zeros)
        return _close(self._stack, _add_up)

    def _push(self, leaf: Sequence[Tensor]) -> None:
        block = Block(0, self.next_id)
        self.next_id += 1
        is_added = bool(self._stack) and self._stack[-1][0].is_left_sibling_of(block)
        is_copied = not is_added and not self._owns_leaves
        _carry(self._stack, block, [t.clone() if is_copied else t for t in leaf], _add_up)


class OwningFold:
    """Folds the micro-batches of a rank that computes all of them. As `TreeFold` adds, but in the
    gradients themselves, which it takes over: nothing is copied, and it has no memory of its own.
    """

    def __init__(self, like: Mapping[str, Tensor], num_microbatches: int) -> None:
        """like: of each leaf a tensor of its shape, type and device."""
        self._like, self._num_microbatches = dict(like), num_microbatches
        self._stack = CarryStack(num_microbatches, owns_leaves=True)

    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        self._stack.begin()

    @property
    def lent(self) -> dict[str, Tensor]:
        """What the leaves of the next micro-batch are added to before any others, so that whoever
        computes them may do so; empty if they come first."""
        return dict(zip(self._like, self._stack.sibling or (), strict=False))

    @torch.no_grad()
    def add(self, microbatch_id: int, leaves: Sequence[Tensor | None]) -> None:
        """leaves: nobody else may have them; one that is None counts as zero, and one of `lent` has
        been added already. WrongInput for a sparse one."""
        expected = self._stack.next_id
        assert microbatch_id == expected, f"expected id {expected}, not {microbatch_id}"
        pairs = zip(leaves, self._like.items(), strict=True)
        self._stack.push(microbatch_id, [_owned(name, leaf, t) for leaf, (name, t) in pairs])

    @torch.no_grad()
    def release_root(self) -> list[Tensor]:
        """The sum over all ids, by leaf; the caller owns it now."""
        next_id = self._stack.next_id
        assert next_id == self._num_microbatches, f"ids from {next_id} on are missing"
        root = self._stack.root()
        assert root is not None
        return root


def fold_blocks(slices: Iterable[tuple[Block, Tensor]]) -> Tensor:
    """The root from blocks that tile the tree, in id order; adds in place."""
    stack: list[tuple[Block, Tensor]] = []
    for block, tensor in slices:
        _carry(stack, block, tensor, Tensor.add_)
    return _close(stack, Tensor.add_)


def _carry(
    stack: list[tuple[Block, Sum]], block: Block, value: Sum, add: Callable[[Sum, Sum], Sum]
) -> None:
    """Put a node behind those to its left; two that are siblings become their parent."""
    while stack and stack[-1][0].is_left_sibling_of(block):
        left, total = stack.pop()
        block, value = left.parent, add(total, value)
    stack.append((block, value))


def _close(stack: list[tuple[Block, Sum]], add: Callable[[Sum, Sum], Sum]) -> Sum:
    """The root, where only absent leaves follow the last node: it stands for its parent."""
    while len(stack) > 1:
        block, value = stack.pop()
        _carry(stack, block.parent, value, add)
    return stack.pop()[1]


def _add_up(totals: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    pairs = [(total, t) for total, t in zip(totals, tensors, strict=True) if total is not t]
    if pairs:
        add_all_([total for total, _ in pairs], [t for _, t in pairs])
    return totals


def fold_scalars(values: ArrayLike) -> float:
    """The sum of one number per id, through the same tree, in float64."""
    level = np.asarray(values, dtype=np.float64)
    assert level.size, "there is nothing to fold"
    while level.size > 1:
        pairs = level[0 : level.size // 2 * 2 : 2] + level[1::2]
        level = np.concatenate([pairs, level[-1:]]) if level.size % 2 else pairs
    return float(level[0])


def refuse_sparse(name: str, gradient: Tensor | None) -> None:
    """WrongInput names the parameter."""
    if gradient is not None and gradient.layout != torch.strided:
        raise WrongInput(
            f"parameter {name!r} has a sparse gradient, which cannot be reduced; "
            "build its layer with sparse=False"
        )


def _owned(name: str, leaf: Tensor | None, like: Tensor) -> Tensor:
    """In the type in which it is added."""
    refuse_sparse(name, leaf)
    dtype = _sum_dtype(like.dtype)
    return torch.zeros_like(like, dtype=dtype) if leaf is None else leaf.to(dtype)


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
        copy_all_(views, present)


def _add_leaves(views: list[Tensor], leaves: Sequence[Tensor | None]) -> None:
    if any(leaf is None for leaf in leaves):
        for view, leaf in zip(views, leaves, strict=True):
            view.add_(0.0 if leaf is None else leaf)  # adding 0 turns -0 into 0, as on other ranks
    elif views:
        present = [leaf for leaf in leaves if leaf is not None]
        add_all_(views, present)
