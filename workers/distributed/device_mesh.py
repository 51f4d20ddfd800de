"""torch's DeviceMesh for one rank of a generation, without any torch process group.

FSDP2 asks the mesh's groups for their sizes and ranks only: what it communicates goes through our
own group (workers/parallel/collectives.py), whose waits can be given up. The default process
group stays free for the user's code.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _Axis:
    """Stands where torch expects the process group of a mesh axis."""

    index: int
    num_ranks: int
    group_name: str = "not to be communicated on"

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.num_ranks


def shard_mesh(device: torch.device, rank: int, world_size: int) -> DeviceMesh:
    """The mesh of the shard axis as `rank` sees it."""
    mesh = DeviceMesh(device.type, list(range(world_size)), _init_backend=False, _rank=rank)
    axis = _Axis(rank, world_size)
    found = cast(Any, mesh)
    found.get_group = lambda mesh_dim=None: axis
    found.get_local_rank = lambda mesh_dim=None: rank
    return mesh
