"""What torch.distributed keeps to itself: its backends' options and flat collectives, its book of
groups, and what DistributedDataParallel is made of."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from torch.nn.parallel import DistributedDataParallel

apply_to_tensors: Any = _apply_to_tensors
"""A function on all tensors in what a module is called with."""
move_arguments: Any = _to_kwargs
"""What a module is called with, to a device."""
_world: Any = distributed_c10d


# --- backends -----------------------------------------------------------------------
def gloo_options(host: str, timeout_s: float) -> Any:
    options = cast(Any, dist.ProcessGroupGloo)._Options()  # the stub calls it Options
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return options


def nccl_options(timeout_s: float) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return options


def all_gather_flat(backend: Any, output: Tensor, tensor: Tensor, *options: Any) -> Any:
    """`output` becomes the ranks' tensors in a row."""
    return backend._allgather_base(output, tensor, *options)


def reduce_scatter_flat(backend: Any, output: Tensor, tensor: Tensor, *options: Any) -> Any:
    """`output` becomes this rank's part of the sum of the ranks' tensors."""
    return backend._reduce_scatter_base(output, tensor, *options)


# --- torch's book of groups ------------------------------------------------------------
def enter_group(
    group: dist.ProcessGroup, backend_name: str, own: dict[int, int], store: Any
) -> None:
    """Torch finds it by its name. own: by rank of the generation, the rank in the group."""
    name = group.group_name
    _world._register_pg_in_world(group, backend_name, store, name, backend_name, rank_mapping=own)


def remove_group(group: dist.ProcessGroup) -> None:
    """Nothing happens to one that is not there."""
    if group in _world._world.pg_names:
        _world._cleanup_process_group_global_state(group)


def mesh_of_groups(
    device: torch.device,
    ranks: Tensor,
    rank: int,
    names: tuple[str, ...],
    groups: Sequence[dist.ProcessGroup],
) -> DeviceMesh:
    """Made without the default group. names, groups: of its axes, as this rank has them."""
    mesh: Any = DeviceMesh(
        device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = [group.group_name for group in groups]
    return mesh


# --- DistributedDataParallel ------------------------------------------------------------
MAKES_REDUCER = "_ddp_init_helper"
SETS_STATIC_GRAPH = "_set_static_graph"
HOOKS_BUFFERS = "_register_buffer_comm_hook"
"""Names of its methods."""


def bucket_config(module: DistributedDataParallel) -> Any:
    return cast(Any, module)._bucket_config


def assign_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], order: Sequence[int]
) -> list[list[int]]:
    """Indices of `tensors` in each bucket of DDP's. limits: bytes of the first ones, the last for
    all others. order: in which gradients come; empty: that of `tensors`."""
    assign: Any = cast(Any, dist)._compute_bucket_assignment_by_size
    found, _ = assign(list(tensors), list(limits), [False] * len(tensors), list(order))
    return found


def list_buffers_anew(module: DistributedDataParallel) -> None:
    """Its list of the model's buffers is as they are now."""
    cast(Any, module)._assign_modules_buffers()


def delays_reduction(module: DistributedDataParallel) -> bool:
    """Of some parameters."""
    return bool(cast(Any, module)._delay_all_reduce_params)
