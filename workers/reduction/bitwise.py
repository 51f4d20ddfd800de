"""Sums that have the same bits at every world size: gradients go into the canonical tree over
micro-batch ids (tree.py) while a backward runs, and its pieces travel while the last one does.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from workers.distributed.process_group import AnyGroup
from workers.reduction.reducers import Reduced
from workers.reduction.tree import FlatLayout, Flats, TreeFold
from workers.reduction.tree_reduction import TreeReduction, pieces_of, reduce_tree

ARRIVED_BYTES = 1 << 20
"""Of gradients that are folded together: a call for each costs more than it saves."""


class BitwiseReducer:
    """See `workers.reduction.reducers.Reducer`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        group: AnyGroup,
        ids: range,
        num_microbatches: int,
    ) -> None:
        self._parameters, self._names = tuple(parameters.values()), tuple(parameters)
        self._buffers = tuple(buffers)
        self._group, self._num_microbatches = group, num_microbatches
        self._layout = FlatLayout(parameters, buffers, group.size())
        self._fold = TreeFold(self._layout, ids, num_microbatches)
        self._pieces_of = self._layout.leaves_in(pieces_of(self._layout, group.size()))
        self._used = [False] * len(self._parameters)
        self._result: tuple[Flats, list[torch.Tensor]] | None = None
        self._backward: _Backward | None = None
        self._has_fired = [False] * len(self._parameters)
        self._may_overlap: bool | None = None
        """None: no backward has been seen. False: one gave a parameter two gradients, so that its
        first one says nothing."""
        self._hooks = (
            [self._hook(i, p) for i, p in enumerate(self._parameters)] if group.size() > 1 else []
        )

    def begin(self) -> None:
        if self._result is not None:  # memory that was touched already is much faster
            flats, views = self._result
            self._fold.recycle(flats, views)
            self._result = None
        self._backward = None
        self._fold.begin()
        self._used = [False] * len(self._parameters)
        self._drop_gradients()

    def before_backward(self, is_last: bool) -> None:
        self._drop_gradients()
        self._has_fired = [False] * len(self._parameters)
        if self._may_overlap:
            group = self._group if is_last else None
            self._backward = _Backward(self._parameters, self._fold, group, self._pieces_of)

    def _hook(self, index: int, parameter: nn.Parameter) -> torch.utils.hooks.RemovableHandle:
        def on_gradient(_: torch.Tensor) -> None:
            if self._has_fired[index]:
                self._may_overlap = False
            self._has_fired[index] = self._used[index] = True
            if self._backward is not None:
                self._backward.on_gradient(index)

        return parameter.register_post_accumulate_grad_hook(on_gradient)

    def after_backward(self, microbatch_id: int, buffers: Sequence[torch.Tensor]) -> None:
        gradients = [p.grad for p in self._parameters]
        self._used = [u or g is not None for u, g in zip(self._used, gradients, strict=True)]
        if self._backward is not None:
            self._backward.end(buffers)
        else:
            self._fold.add(microbatch_id, [*gradients, *buffers])
        if self._may_overlap is None:
            self._may_overlap = self._group.size() > 1
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def serve_pass(self) -> None:
        raise AssertionError("replicas need nothing of each other's passes")

    @property
    def used(self) -> set[str]:
        return {name for name, used in zip(self._names, self._used, strict=True) if used}

    def finish(self) -> Reduced:
        if self._backward is not None:
            flats = self._backward.finish()
        else:
            flats = reduce_tree(self._group, self._fold, self._num_microbatches)
        views = self._layout.views(flats)
        self._result = flats, views
        sums = dict(zip((*self._names, *self._buffers), views, strict=True))
        gradients = {
            n: sums[n].to(p.dtype) for n, p in zip(self._names, self._parameters, strict=True)
        }
        return Reduced(gradients, {name: sums[name] for name in self._buffers})

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._drop_gradients()


class _Backward:
    """One backward of a step: gradients are folded as they arrive, and their memory is free again;
    in the last one a piece is launched once all of its gradients are there."""

    def __init__(
        self,
        parameters: tuple[nn.Parameter, ...],
        fold: TreeFold,
        group: AnyGroup | None,
        pieces_of: Sequence[Sequence[int]],
    ) -> None:
        """fold: at its next micro-batch. group: of the last one, else None. pieces_of: each leaf's
        pieces, by their numbers."""
        self._parameters, self._names = parameters, fold.layout.names
        self._arriving = fold.add_slowly(fold.next_id)
        self._reduction = group and TreeReduction(group, fold, fold.num_microbatches)
        self._pieces_of: Sequence[Sequence[int]] = ()
        self._num_missing: list[int] = []
        if self._reduction is not None:
            self._pieces_of = pieces_of
            self._num_missing = [0] * len(self._reduction.pieces)
            for covered in pieces_of:
                for piece in covered:
                    self._num_missing[piece] += 1
        self._arrived: dict[int, None] = {}
        """Parameters whose gradients are not folded yet, in the order of arrival."""
        self._arrived_bytes = 0
        self._is_folded = [False] * len(parameters)
        self._num_ready = 0
        self._error: Exception | None = None

    def on_gradient(self, index: int) -> None:
        gradient = self._parameters[index].grad
        if self._error is not None or gradient is None or index in self._arrived:
            return
        if self._is_folded[index]:
            self._error = RuntimeError(
                f"parameter {self._names[index]!r} got a second gradient in one backward, and only "
                "one in the backwards before; use checkpoint(use_reentrant=False)"
            )
            return
        self._arrived[index] = None
        self._arrived_bytes += gradient.numel() * gradient.element_size()
        if self._reduction is not None:
            for piece in self._pieces_of[index]:
                self._num_missing[piece] -= 1
        try:
            self._advance()
        except Exception as error:  # autograd would make it its own; `end` and `finish` raise it
            self._error = error

    def _advance(self) -> None:
        ready = self._num_ready
        while ready < len(self._num_missing) and not self._num_missing[ready]:
            ready += 1
        if ready > self._num_ready or self._arrived_bytes >= ARRIVED_BYTES:
            self._add_arrived()
        if self._reduction is not None:
            for piece in self._reduction.pieces[self._num_ready : ready]:
                self._arriving.fold(*piece)
            self._num_ready = ready
            self._reduction.launch(ready)

    def _add_arrived(self) -> None:
        arrived = list(self._arrived)
        self._arrived, self._arrived_bytes = {}, 0
        self._arriving.add(arrived, [self._parameters[i].grad for i in arrived])
        for i in arrived:
            self._is_folded[i], self._parameters[i].grad = True, None

    def end(self, buffers: Sequence[torch.Tensor]) -> None:
        """The backward is over; what gave no gradient counts as zeros."""
        if self._error is not None:
            if self._reduction is not None:
                return  # `finish` raises it, where the step is reduced
            raise self._error
        count = len(self._parameters)
        left = [i for i in range(count) if not self._is_folded[i]]
        self._arriving.add(left, [self._parameters[i].grad for i in left])
        self._arriving.add(range(count, count + len(buffers)), buffers)
        if self._reduction is None:
            self._arriving.fold_all()
        else:
            for piece in self._reduction.pieces[self._num_ready :]:
                self._arriving.fold(*piece)
        self._arriving.close()

    def finish(self) -> Flats:
        """Of the last one. A collective. Raises PeerLost, and what a gradient's arrival raised."""
        if self._error is not None:
            raise self._error
        assert self._reduction is not None
        return self._reduction.finish()
