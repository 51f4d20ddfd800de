"""A micro-batch on a rank that takes nothing from it: shapes, which the first stage tells, and no
values. Nothing is loaded for it.

Which blocks take something of a batch is readers.py's.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.protocol.pipeline import Stages
from workers.data.loader import AnyLoader, LoadedBatch
from workers.parallel.pipeline.absent import Absent
from workers.torch_private.dispatch import tree_flatten, tree_unflatten

Tell = Callable[[Tensor, int], None]
"""Numbers of a micro-batch, to or from other ranks."""


def places_without(stages: Stages, readers: Collection[int]) -> list[int]:
    """The ranks of a pipeline that take nothing from a batch: neither the first, which has what
    comes before the blocks, nor that with the loss, nor one with one of these blocks."""
    found: list[int] = []
    for place in range(1, stages.depth):
        mine = stages.stages_at(place)
        blocks = [block for stage in mine for block in stages.blocks(stage)]
        if stages.num_stages - 1 not in mine and not any(block in readers for block in blocks):
            found.append(place)
    return found


@dataclass(frozen=True, slots=True)
class Structure:
    """Of a micro-batch that is made of tensors alone: what is the same in all of them."""

    spec: Any
    """Of its tree."""
    dims: tuple[int, ...]
    """How many each tensor has."""
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, batch: Any) -> "Structure | None":
        """None: there is something else in it, too."""
        leaves, spec = tree_flatten(batch)
        if not leaves or any(type(leaf) is not Tensor for leaf in leaves):
            return None
        return cls(spec, tuple(t.dim() for t in leaves), tuple(t.dtype for t in leaves))

    def __str__(self) -> str:
        """Equal where the structures are."""
        return f"{self.spec} {self.dims} {self.dtypes}"

    def blank(self) -> Tensor:
        """For `numbers`."""
        return torch.zeros(1 + 2 * sum(self.dims), dtype=torch.int64)

    def numbers(self, batch: Any) -> Tensor:
        """1, then all shapes and strides; zeros for a batch that is made otherwise."""
        told = self.blank()
        if Structure.of(batch) == self:
            leaves: list[Tensor] = tree_flatten(batch)[0]
            flat = [number for t in leaves for number in (*t.shape, *t.stride())]
            told.copy_(torch.tensor([1, *flat], dtype=torch.int64))
        return told

    def stand_in(self, numbers: Tensor) -> Any:
        """The batch without values, on the host; None for zeros."""
        is_such, *rest = numbers.tolist()
        if not is_such:
            return None
        leaves: list[Absent] = []
        for dims, dtype in zip(self.dims, self.dtypes, strict=True):
            shape, strides, rest = rest[:dims], rest[dims : 2 * dims], rest[2 * dims :]
            leaves.append(Absent(shape, strides, dtype, torch.device("cpu")))
        return tree_unflatten(leaves, self.spec)


class StandIns:
    """In the place of a worker's loader: see the module."""

    def __init__(self, loader: AnyLoader, structure: Structure, hear: Tell) -> None:
        self._loader, self._structure, self._hear = loader, structure, hear

    def assign(self, step: int, ids: range) -> None:
        pass  # nothing is loaded ahead

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        numbers = self._structure.blank()
        self._hear(numbers, microbatch_id)
        batch = self._structure.stand_in(numbers)
        if batch is None:
            return self.fetch(step, microbatch_id)
        return LoadedBatch(step, microbatch_id, np.empty(0, np.int64), batch)

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        return self._loader.fetch(step, microbatch_id)


class Announced:
    """A worker's loader, whose micro-batches' shapes are told to others."""

    def __init__(self, loader: AnyLoader, structure: Structure, tell: Tell) -> None:
        self._loader, self._structure, self._tell = loader, structure, tell

    def assign(self, step: int, ids: range) -> None:
        self._loader.assign(step, ids)

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        loaded = self._loader.next(step, microbatch_id, is_cancelled)
        self._tell(self._structure.numbers(loaded.batch), microbatch_id)
        return loaded

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        return self._loader.fetch(step, microbatch_id)
