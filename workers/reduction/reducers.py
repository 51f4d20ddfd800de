"""The two ways to sum a step's gradients over micro-batches and ranks, behind one interface.

A reducer belongs to one generation: an abandoned collective may still write into its buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from workers.distributed.process_group import AnyGroup
from workers.parallel.shards import local
from workers.reduction.buckets import GradientBuckets
from workers.reduction.tree import FlatLayout, Flats, TreeFold, reduce_tree


@dataclass(frozen=True, slots=True)
class Reduced:
    """Sums over all micro-batches of a step: on every rank, or a rank's rows where sharded.

    gradients: per parameter, None where this rank knows of none (only with one rank).
    buffers: the tracked floating buffers in their order, float64.
    """

    gradients: tuple[torch.Tensor | None, ...]
    buffers: tuple[torch.Tensor, ...]

    def is_finite(self) -> bool:
        by_device: dict[torch.device, list[torch.Tensor]] = {}  # shards may be in host memory
        for gradient in self.gradients:
            if gradient is not None:
                by_device.setdefault(gradient.device, []).append(local(gradient))
        return all(_are_finite(gradients) for gradients in by_device.values())


def _are_finite(gradients: list[torch.Tensor]) -> bool:
    each = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
    return bool(torch.isfinite(torch.stack([n.float() for n in each])).all())


class Reducer(Protocol):
    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        ...

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self, microbatch_id: int, buffers: Sequence[torch.Tensor]) -> None: ...

    def serve_pass(self) -> None:
        """Where other ranks have a micro-batch more: do for their pass what they need of this one.
        After a pass of its own in this step. Raises what a backward raises."""
        ...

    def has_gradient(self) -> list[bool]:
        """Per parameter: did the micro-batch just finished, or one before it, give a gradient?"""
        ...

    def finish(self) -> Reduced:
        """A collective. Raises PeerLost. The result is valid until the next `begin`."""
        ...

    def close(self) -> None: ...


class FastReducer:
    """Stock all-reduces of buckets, overlapping with the last backward."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        group: AnyGroup,
    ) -> None:
        self._parameters = tuple(parameters.values())
        self._buffers = tuple(buffers.values())
        self._buckets = GradientBuckets(parameters, group)
        self._used = [False] * len(self._parameters)

    def begin(self) -> None:
        self._buckets.begin()
        self._used = [False] * len(self._parameters)

    def before_backward(self, is_last: bool) -> None:
        if is_last:
            self._buckets.arm()

    def after_backward(self, microbatch_id: int, buffers: Sequence[torch.Tensor]) -> None:
        self._buckets.add_buffers(buffers)
        self._used = [p.grad is not None for p in self._parameters]

    def serve_pass(self) -> None:
        raise AssertionError("replicas need nothing of each other's passes")

    def has_gradient(self) -> list[bool]:
        return self._used

    def finish(self) -> Reduced:
        gradients, flat = self._buckets.finish()
        sizes = [b.numel() for b in self._buffers]
        sums = () if flat is None else flat.split(sizes)
        views = tuple(s.view(b.shape) for s, b in zip(sums, self._buffers, strict=True))
        return Reduced(tuple(gradients), views)

    def close(self) -> None:
        self._buckets.close()


class BitwiseReducer:
    """The canonical tree over micro-batch ids (workers/reduction/tree.py)."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        group: AnyGroup,
        ids: range,
        num_microbatches: int,
    ) -> None:
        self._parameters = tuple(parameters.values())
        self._group, self._num_microbatches = group, num_microbatches
        self._layout = FlatLayout(parameters, buffers, group.world_size)
        self._fold = TreeFold(self._layout, ids, num_microbatches)
        self._used = [False] * len(self._parameters)
        self._result: Flats | None = None

    def begin(self) -> None:
        if self._result is not None:  # memory that was touched already is much faster
            self._fold.recycle(self._result)
            self._result = None
        self._fold.begin()
        self._used = [False] * len(self._parameters)
        self._drop_gradients()

    def before_backward(self, is_last: bool) -> None:
        self._drop_gradients()

    def after_backward(self, microbatch_id: int, buffers: Sequence[torch.Tensor]) -> None:
        gradients = [p.grad for p in self._parameters]
        self._used = [u or g is not None for u, g in zip(self._used, gradients, strict=True)]
        self._fold.add(microbatch_id, [*gradients, *buffers])
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def serve_pass(self) -> None:
        raise AssertionError("replicas need nothing of each other's passes")

    def has_gradient(self) -> list[bool]:
        return self._used

    def finish(self) -> Reduced:
        self._result = reduce_tree(self._group, self._fold, self._num_microbatches)
        views = self._layout.views(self._result)
        count = len(self._parameters)
        gradients = (v.to(p.dtype) for v, p in zip(views[:count], self._parameters, strict=True))
        return Reduced(tuple(gradients), tuple(views[count:]))

    def close(self) -> None:
        self._drop_gradients()
