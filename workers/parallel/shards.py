"""Shards as values: which rows of a tensor a rank holds.

The tensors themselves are train_state/tensors.py's, wrapping a model is fsdp2_private's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from elastic.protocol.mesh import Mesh
from workers.train_state.tensors import is_shard


class RowsLost(Exception):
    """Some rows of the state are held by no member. Every member sees it."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor of the state, whoever holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    is_sharded: bool

    def rows(self, mesh: Mesh, rank: int) -> range:
        """What `rank` holds of it; a replicated tensor counts as one row."""
        return mesh.rows(self.shape[0], rank) if self.is_sharded else range(1)

    @property
    def row_bytes(self) -> int:
        shape = self.shape[1:] if self.is_sharded else self.shape
        return self.dtype.itemsize * torch.Size(shape).numel()

    def empty(self, rows: range, device: torch.device) -> Tensor:
        shape = (len(rows), *self.shape[1:]) if self.is_sharded else self.shape
        return torch.empty(shape, dtype=self.dtype, device=device)

    def to_json(self) -> list[Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.name, dtype, list(self.shape), self.is_sharded]

    @classmethod
    def from_json(cls, value: list[Any]) -> "TensorLayout":
        return cls(value[0], getattr(torch, value[1]), tuple(value[2]), value[3])


def kinds_of(tensors: Mapping[str, Tensor]) -> list[TensorLayout]:
    """ValueError for state that is neither whole nor rows: nobody could tell who holds what."""
    for name, tensor in tensors.items():
        placements = cast(Any, tensor)._spec.placements if is_shard(tensor) else ()
        if len(placements) > 1:
            raise ValueError(
                f"{name} is cut as {placements}, and only rows over one axis can be told apart"
            )
        if placements and not placements[0].is_shard(0):
            raise ValueError(
                f"{name} is no rows of a sharded tensor: state of the optimizer must have its "
                "parameter's shape (torch.zeros_like(parameter)) or be made without it"
            )
    return [TensorLayout(n, t.dtype, tuple(t.shape), is_shard(t)) for n, t in tensors.items()]


def pattern_of(
    name: str, shape: tuple[int, ...], parameters: Mapping[str, Tensor]
) -> Tensor | None:
    """The sharded parameter that the tensor `name` of a state
    (workers/train_state/serialization.py) is sharded as: itself, or the one whose optimizer state
    it is, if that has its shape. None: it is replicated.
    """
    kind, _, rest = name.partition("/")
    candidates = [rest] if kind == "model" else []
    if kind == "optimizer":
        parts = rest.split("/")
        candidates = ["/".join(parts[:n]) for n in range(1, len(parts))]
    for candidate in candidates:
        parameter = parameters.get(candidate)
        if parameter is not None and is_shard(parameter) and tuple(parameter.shape) == shape:
            return parameter
    return None
