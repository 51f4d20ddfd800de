"""Fast mode: gradients summed over ranks in buckets, while backward still runs.

The order of addition is the backend's. The canonical tree is in tree.py.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from workers.distributed.process_group import AnyGroup
from workers.reduction.reducers import Reduced
from workers.reduction.tree import Group, Pending, refuse_sparse
from workers.tensors.strides import dense_strides
from workers.torch_private.tensors import copy_all_

BUCKET_BYTES = {"cpu": 2 << 20, "cuda": 25 << 20}
LARGE_BYTES = 1 << 18
"""Gradients below it move into their bucket together, once it is full: a call for each costs more
than their memory is worth."""


class FastReducer:
    """See `workers.reduction.reducers.Reducer`. All-reduces overlap with the last backward."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        group: AnyGroup,
    ) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._buckets = GradientBuckets(parameters, group)
        self.used: set[str] = set()

    def begin(self) -> None:
        self._buckets.begin()
        self.used = set()

    def before_backward(self, is_last: bool) -> None:
        if is_last:
            self._buckets.arm()

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        self._buckets.add_buffers(buffers)
        self.used = {name for name, p in self._parameters.items() if p.grad is not None}

    def serve_pass(self) -> None:
        raise AssertionError("replicas need nothing of each other's passes")

    def finish(self) -> Reduced:
        gradients, flat = self._buckets.finish()
        sizes = [b.numel() for b in self._buffers.values()]
        sums = () if flat is None else flat.split(sizes)
        pairs = zip(sums, self._buffers.items(), strict=True)
        return Reduced(gradients, {name: s.view(b.shape) for s, (name, b) in pairs})

    def close(self) -> None:
        self._buckets.close()


class _Bucket:
    """Parameters whose gradients travel together, and the flat buffer they travel in."""

    def __init__(self, members: list[int], parameters: Sequence[Tensor]) -> None:
        self.members = members
        self.parameters = [parameters[i] for i in members]
        like = parameters[members[0]]
        sizes = [parameters[i].numel() for i in members]
        self.flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        self.views = [
            piece.as_strided(parameters[i].shape, dense_strides(parameters[i]))
            for i, piece in zip(members, self.flat.split(sizes), strict=True)
        ]
        self.num_missing = len(members)


class GradientBuckets:
    """The gradients of one generation's steps: `begin`, backwards, `arm`, last backward, `finish`.

    One per generation (an abandoned collective may still write into its buffers); `close` removes
    its hooks. Buckets are cut on parameter borders, last parameters first, and all ranks launch
    them in that order whatever order gradients arrive in.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], group: Group, bucket_bytes: int | None = None
    ) -> None:
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._group = group
        self._buckets: list[_Bucket] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._is_armed = False
        self._has_fired = [False] * len(self._parameters)
        self._num_launched = 0
        self._pending: list[Pending] = []
        self._error: Exception | None = None
        self._buffer_sums: Tensor | None = None
        if group.size() > 1:
            self._buckets = [_Bucket(m, self._parameters) for m in self._cut(bucket_bytes)]
            self._bucket_of = {i: b for b in self._buckets for i in b.members}
            self._hooks = [self._hook(i, p) for i, p in enumerate(self._parameters)]

    def _cut(self, bucket_bytes: int | None) -> list[list[int]]:
        done: list[list[int]] = []
        filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for i in reversed(range(len(self._parameters))):
            p = self._parameters[i]
            limit = bucket_bytes or BUCKET_BYTES.get(p.device.type, 25 << 20)
            members, size = filling.get((p.dtype, p.device), ([], 0))
            members, size = [*members, i], size + p.numel() * p.element_size()
            filling[p.dtype, p.device] = members, size
            if size >= limit:
                done.append(filling.pop((p.dtype, p.device))[0])
        return done + [members for members, _ in filling.values()]

    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step. Drops all gradients."""
        for p in self._parameters:
            p.grad = None
        self._is_armed = False
        self._error = None
        self._buffer_sums = None
        self._num_launched = 0
        self._pending = []
        self._has_fired = [False] * len(self._parameters)
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.members)

    def arm(self) -> None:
        """Just before the last backward of the step: from now on full buckets are launched."""
        self._is_armed = True

    def add_buffers(self, leaves: Sequence[Tensor]) -> None:
        """One micro-batch's floating buffers (float64), to be summed with the gradients."""
        if leaves:
            flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
            self._buffer_sums = flat if self._buffer_sums is None else self._buffer_sums.add_(flat)

    def finish(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Launch what is left, wait, and give (summed gradients, flat summed buffers).

        A collective: an exception inside a hook is raised here. The gradients are the buckets'
        memory: valid until the next `begin`. With one rank they are the parameters' own, where
        there are any; else a parameter without gradient has zeros.
        """
        self._is_armed = False
        if self._group.size() == 1:
            pairs = zip(self._names, self._parameters, strict=True)
            found = {name: p.grad for name, p in pairs if p.grad is not None}
            for name, gradient in found.items():
                refuse_sparse(name, gradient)
            return found, self._buffer_sums
        if self._error is None:
            self._launch_all()
        if self._error is not None:
            raise self._error
        for pending in self._pending:
            pending.wait()
        views = {
            i: view
            for bucket in self._buckets
            for i, view in zip(bucket.members, bucket.views, strict=True)
        }
        return {name: views[i] for i, name in enumerate(self._names)}, self._buffer_sums

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, index: int, parameter: Tensor) -> torch.utils.hooks.RemovableHandle:
        bucket = self._bucket_of[index]
        view = bucket.views[bucket.members.index(index)]

        is_large = view.numel() * view.element_size() >= LARGE_BYTES

        def on_gradient(_: Tensor) -> None:
            if is_large or not self._is_armed:
                adopt([parameter], [view])
            if not self._is_armed or self._error is not None:
                return
            if self._has_fired[index]:
                if self._buckets.index(bucket) < self._num_launched:
                    self._error = RuntimeError(
                        f"parameter {self._names[index]!r} got a second gradient in one backward "
                        "after the first was sent; use checkpoint(use_reentrant=False), or "
                        "reduction='bitwise'"
                    )
                return
            self._has_fired[index] = True
            bucket.num_missing -= 1
            if not bucket.num_missing:
                adopt(bucket.parameters, bucket.views)
                self._launch_ready()

        return parameter.register_post_accumulate_grad_hook(on_gradient)

    def _launch_ready(self) -> None:
        # Autograd would turn an exception here into its own; finish() raises it as it is.
        try:
            while self._num_launched < len(self._buckets):
                bucket = self._buckets[self._num_launched]
                if bucket.num_missing:
                    return
                self._launch(bucket)
        except Exception as error:
            self._error = error

    def _launch_all(self) -> None:
        while self._num_launched < len(self._buckets):
            self._launch(self._buckets[self._num_launched])
        if self._buffer_sums is not None:
            self._pending.append(self._group.all_reduce(self._buffer_sums))

    def _launch(self, bucket: _Bucket) -> None:
        for i, parameter, view in zip(bucket.members, bucket.parameters, bucket.views, strict=True):
            refuse_sparse(self._names[i], parameter.grad)
            if parameter.grad is None:
                view.zero_()
        adopt(bucket.parameters, bucket.views)
        self._num_launched += 1
        self._pending.append(self._group.all_reduce(bucket.flat))


def adopt(parameters: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """The gradients move into `views`, where later backwards add to them: no memory beside it."""
    moved: list[Tensor] = []
    places: list[Tensor] = []
    for parameter, view in zip(parameters, views, strict=True):
        gradient = parameter.grad
        if gradient is None or gradient is view or gradient.layout != torch.strided:
            continue  # `refuse_sparse` says so later
        if gradient.data_ptr() != view.data_ptr():
            moved.append(gradient)
            places.append(view)
            parameter.grad = view
    if moved:
        with torch.no_grad():
            copy_all_(places, moved)
