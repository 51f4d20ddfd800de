"""What FSDP2 knows of one parameter (FSDPParam) and of one group of them (FSDPParamGroup)."""

from typing import Any

import torch
from torch import Tensor, nn

from workers.parallel.fsdp2_private.hooks import GradientSlices, ParameterGather
from workers.tensors.local import local


class ShardedParameter:
    """A parameter of which each rank holds rows."""

    def __init__(self, param: Any) -> None:
        """param: FSDP2's record of it."""
        self._param = param

    @property
    def parameter(self) -> nn.Parameter:
        """The one that the optimizer has."""
        return self._param.sharded_param

    @property
    def gathered(self) -> nn.Parameter | None:
        """The whole parameter, which autograd sees; None before the first forward."""
        return getattr(self._param, "_unsharded_param", None)

    @property
    def whole_gradient(self) -> Tensor | None:
        """What the passes since the last `drop_whole_gradient` have added up; upcast where it was
        half."""
        summed, whole = self._param.unsharded_accumulated_grad, self.gathered
        return summed if summed is not None or whole is None else whole.grad

    def drop_whole_gradient(self) -> None:
        self._param.unsharded_accumulated_grad = None
        if self.gathered is not None:
            self.gathered.grad = None

    @property
    def rows_shape(self) -> torch.Size:
        """Of this rank's rows."""
        return self._param.sharded_size

    @property
    def padded_numel(self) -> int:
        """Of this rank's rows, as they are sent."""
        return self._param.padded_sharded_param_size.numel()

    def sharded(self, rows: Tensor) -> Tensor:
        """This rank's rows as a tensor that is sharded as the parameter is."""
        return self._param.to_sharded_dtensor(rows)


class ParameterGroup:
    """What is gathered, and whose gradients are sent, at once."""

    def __init__(self, group: Any) -> None:
        """group: FSDP2's record of it."""
        self._group = group
        self.trained = [
            ShardedParameter(p) for p in group.fsdp_params if p.sharded_param.requires_grad
        ]
        self.device: torch.device = group.device

    def communicate(self, gather: ParameterGather, slices: GradientSlices) -> None:
        """Send through these from now on."""
        self._group._all_gather_comm = gather
        self._group._reduce_scatter_comm = slices

    @property
    def num_shards(self) -> int:
        return self._group.mesh_info.shard_mesh_size

    @property
    def has_many_uses(self) -> bool:
        """A module that ran several times in this forward sends its gradient in as many parts."""
        return len(self._group._post_forward_indices) > 1

    def like(self) -> Tensor:
        """This rank's rows of one of its trained parameters."""
        return local(self.trained[0].parameter.detach())

    def gather(self) -> None:
        """Serve this rank's rows to the others' forward, and use nothing of what comes."""
        self._group.unshard()
        gathered, self._group._all_gather_result = self._group._all_gather_result, None
        self._group._wait_all_gather_streams_on_event(gathered.all_gather_event)

    def send_nothing(self) -> None:
        """Take this rank's slices of the others' gradients: without a gradient, it sends zeros."""
        self._group.post_backward()
