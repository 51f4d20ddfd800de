"""What FSDP2 sends, over the group of the generation: all-gathers of parameters, gradient slices.

Every wait can be given up: a lost peer ends in `on_lost`, which must raise. What becomes of the
slices is the strategy's business (fsdp.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from elastic.protocol.errors import PeerLost
from workers.reduction.tree import Group, Pending


class FlatGroup(Group, Protocol):
    """A group that exchanges flat tensors without a copy (workers/groups.py)."""

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Pending: ...
    def all_to_all_flat(self, output: Tensor, tensor: Tensor) -> Pending: ...


class Collectives:
    """One generation's group as FSDP2's hooks use it, in the middle of the user's forward."""

    def __init__(
        self,
        group: FlatGroup,
        on_lost: Callable[[PeerLost], NoReturn],
        gathering: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """gathering: entered while this rank waits for its peers (workers/health/vitals.py)."""
        self._group, self._on_lost, self._gathering = group, on_lost, gathering
        self.rank, self.world_size = group.rank, group.world_size
        self.sent_bytes = 0
        """What this rank has sent to others."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self.sent_bytes += tensor.nbytes * (self.world_size - 1)
        self._wait(lambda: self._group.all_gather_flat(output, tensor))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """The stretches that the ranks have for this one, in rank order."""
        self.sent_bytes += tensor.nbytes // self.world_size * (self.world_size - 1)
        received = torch.empty_like(tensor)
        self._wait(lambda: self._group.all_to_all_flat(received, tensor))
        return received

    def _wait(self, launch: Callable[[], Pending]) -> None:
        try:
            with self._gathering():
                launch().wait()
        except PeerLost as error:
            self._on_lost(error)


class _Memory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ParameterGather(_Memory, AllGather):
    """FSDP2's all-gather of a parameter group."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._collectives.all_gather(output_tensor, input_tensor)


class GradientSlices(_Memory, ReduceScatter):
    """FSDP2's reduce-scatter of a parameter group, without the sum.

    on_slices: gets this rank's slice of every rank's gradient, one behind the other in rank order,
    and the memory that FSDP2 takes for the result.
    """

    def __init__(
        self, collectives: Collectives, on_slices: Callable[[Tensor, Tensor], None]
    ) -> None:
        self._collectives, self._on_slices = collectives, on_slices

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._on_slices(self._collectives.all_to_all(input_tensor), output_tensor)
