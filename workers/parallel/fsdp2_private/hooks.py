"""Where FSDP2 sends: its own collectives, replaced by those of a generation (collectives.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from workers.parallel.collectives import Collectives


class _Memory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ParameterGather(_Memory, AllGather):
    """FSDP2's all-gather of a parameter group. on_gather: is told of each."""

    def __init__(
        self, collectives: Collectives, on_gather: Callable[[], None] = lambda: None
    ) -> None:
        self._collectives, self._on_gather = collectives, on_gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._on_gather()
        self._collectives.all_gather(output_tensor, input_tensor)


class GradientSlices(_Memory, ReduceScatter):
    """FSDP2's reduce-scatter of a parameter group, without the sum.

    name: of the parameter group. on_slices: gets this rank's slice of every rank's gradient, one
    behind the other in rank order, and the memory that FSDP2 takes for the result.
    """

    def __init__(
        self, collectives: Collectives, name: str, on_slices: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._collectives, self._name, self._on_slices = collectives, name, on_slices

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._on_slices(self._collectives.all_to_all(input_tensor, self._name), output_tensor)
