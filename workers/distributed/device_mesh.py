"""torch's DeviceMesh over the groups of one generation, and its default group while it needs one.

Each generation's mesh has axis names of its own. DTensor remembers how it sharded an operation by
the mesh's ranks and axis names, not by its groups: two generations of equal ranks and names would
share what it remembers, with the dead generation's group in it.

A mesh is made without the default process group, which torch's own ways ask for: it is the user's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workers.distributed.process_group import Group
from workers.torch_private.c10d import mesh_of_groups


class Unconnected(Group):
    """The group of a place in a mesh before its generation's groups are there, or of a rank that
    is inactive: it has a size and no members. Every operation raises PeerLost."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(None, rank, world_size, "unconnected")
        self.is_abandoned = True


def device_mesh(
    device: torch.device, group: Group, axes: Mapping[str, Group], ranks: torch.Tensor
) -> DeviceMesh:
    """The mesh of a generation as this rank sees it; `axis_name` has the names of its axes.

    group: the generation's own. axes: by name the group that this rank has along the axis. ranks:
    of the generation, one dim per axis, in the order of `axes`.
    """
    group.register(range(group.size()))
    names = tuple(axis_name(axis, group) for axis in axes)
    return mesh_of_groups(device, ranks, group.rank(), names, list(axes.values()))


def axis_name(axis: str, group: Group) -> str:
    """Of an axis of `group`'s generation, as torch has it."""
    return f"{axis}@{group.group_name}"


def shard_mesh(device: torch.device, shards: Group) -> DeviceMesh:
    """The mesh of a shard axis alone, in which a rank's number is its shard's."""
    return device_mesh(device, shards, {"dp_shard": shards}, torch.arange(shards.size()))


@contextmanager
def default_group(group: Group) -> Iterator[None]:
    """Within, `group` is the process's default group: for code of torch that cannot do without one,
    as pipeline stages and `parallelize_module`, which ask it for this process's rank.

    Outside, the default group stays the user's.
    """
    group.register(range(group.size()))
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before
