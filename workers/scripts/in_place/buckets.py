"""Which gradients of a model travel together: where stock DDP cuts, so that the sums of three and
more ranks have its bits. When they travel is unit.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.tensors.strides import dense_strides
from workers.torch_private.c10d import assign_buckets, bucket_config


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together."""

    indices: list[int]
    parameters: list[Tensor]
    spare: tuple[Tensor, list[Tensor]] | None = None
    """The memory of the unit before: flat, and by parameter."""

    def take_memory(self) -> tuple[Tensor, list[Tensor]]:
        found, self.spare = self.spare, None
        if found is not None:
            return found
        sizes = [p.numel() for p in self.parameters]
        like = self.parameters[0]
        flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        views = [
            piece.as_strided(p.shape, dense_strides(p))
            for p, piece in zip(self.parameters, flat.split(sizes), strict=True)
        ]
        return flat, views


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the buckets, in bytes: the first one's, the next one's, and so on; the last holds for all
    that follow."""

    at_first: tuple[int, ...]
    """In the first unit, by the order of the parameters, the last ones first."""
    then: tuple[int, ...] = ()
    """Once the order of the gradients is known, by that; empty: as at first."""
    skips_first_backward: bool = False
    """Its order is not that of the following ones: of a static graph, as torch has it."""

    @classmethod
    def of(cls, module: Any, *, is_static: bool) -> "Limits":
        """Those of a DistributedDataParallel, with a static graph or without."""
        config = bucket_config(module)
        at_first, then = config.compute_bucket_size_limits(
            static_graph=is_static, find_unused_parameters=module.find_unused_parameters
        )
        if module.find_unused_parameters and not is_static:
            return cls(tuple(at_first))
        uniform = (config.first_bucket_bytes_cap, config.bucket_bytes_cap)
        return cls(tuple(at_first), tuple(then) or uniform, is_static)


def at_first(parameters: Sequence[Tensor], limits: Limits) -> list[Bucket]:
    """The last parameters first: their gradients come first."""
    return list(reversed(cut(parameters, limits.at_first, ())))


def rebuilt(parameters: Sequence[Tensor], limits: Limits, order: Sequence[int]) -> list[Bucket]:
    """order: of all parameters, as their gradients have come."""
    return cut(parameters, limits.then, order)


def cut(parameters: Sequence[Tensor], limits: Sequence[int], order: Sequence[int]) -> list[Bucket]:
    """order: in which they are taken; empty: their own."""
    taken = [parameters[i] for i in order] if order else list(parameters)
    found = assign_buckets(taken, limits, order)
    return [Bucket(indices, [parameters[i] for i in indices]) for indices in found]
