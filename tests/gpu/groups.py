"""Groups over NCCL and staged ones for experiments, without a run around them.

Where torch has no GPU the same scripts can be tried over gloo (`--anywhere`): that says whether
they work, and nothing of a GPU.
"""

import itertools
import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from elastic.protocol import nccl_settings
from tests.workers import ranks
from workers.distributed import gloo, nccl, process_group
from workers.distributed.backends import connect_for, connect_staged
from workers.distributed.process_group import Alone, Connect, Formation, Group
from workers.distributed.rendezvous import Rendezvous

HOST = "127.0.0.1"
JOIN_S, OPERATION_S = 60.0, 300.0
HAS_GPU = torch.cuda.is_available()
_numbers = itertools.count(1)


def device_of(index: int = 0) -> torch.device:
    return torch.device("cuda", index) if HAS_GPU else torch.device("cpu")


def set_environment() -> None:
    """As a worker does, before torch's first group."""
    os.environ.update(nccl_settings.settings(os.environ, "lo", JOIN_S))


def data_only(device: torch.device) -> Connect:
    """Without the control group, which would be the first to wait for an absent peer."""
    return partial(nccl.connect, device) if HAS_GPU else partial(gloo.connect, HOST)


class Meeting:
    """Where ranks of this process meet."""

    def __init__(self) -> None:
        set_environment()
        self._rendezvous = Rendezvous(HOST)

    def form(self, connect: Connect, rank: int = 0, world_size: int = 1) -> Formation:
        """Begin to."""
        number = next(_numbers)
        return process_group.form(
            store_address=self._rendezvous.open(number), prefix=f"gpu/{number}", rank=rank,
            world_size=world_size, connect=connect, join_timeout_s=JOIN_S,
            operation_timeout_s=OPERATION_S,
        )  # fmt: skip


class Member:
    """A process of an experiment of several ranks."""

    def __init__(self, those: ranks.Ranks, *, is_shared: bool) -> None:
        """is_shared: all use the first GPU, over the staged group; else one each, over NCCL."""
        set_environment()
        self.ranks, self.index = those, those.index
        self.device = device_of(0 if is_shared else those.index)
        if HAS_GPU:
            torch.cuda.set_device(self.device)
        self.connect = connect_staged(HOST) if is_shared else connect_for(self.device, HOST)
        self.data_only = data_only(self.device)

    def begin(self, name: Any, members: list[int], connect: Connect | None = None) -> Formation:
        """To form the group of this name."""
        return process_group.form(
            store_address=self.ranks.address, prefix=f"{name}", rank=members.index(self.index),
            world_size=len(members), connect=connect or self.connect, join_timeout_s=JOIN_S,
            operation_timeout_s=OPERATION_S,
        )  # fmt: skip

    def form(self, name: Any, members: list[int], connect: Connect | None = None) -> Group:
        return Alone() if len(members) == 1 else self.begin(name, members, connect).wait(JOIN_S)


def on_gpus(
    world_size: int, body: Callable[[Member], Any], *, is_shared: bool, killed: tuple[int, ...] = ()
) -> list[Any]:
    """body(member) in a process per rank; what they give, in rank order."""
    return ranks.run_ranks(
        world_size, lambda those: body(Member(those, is_shared=is_shared)), killed=killed
    )


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@cache
def cycles_per_s(device: torch.device) -> float:
    """Of the kernel below, measured."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)
    first.record()
    torch.cuda._sleep(10**8)
    last.record()
    last.synchronize()
    return 1e11 / first.elapsed_time(last)


def spin(device: torch.device, seconds: float) -> None:
    """A kernel that takes about so long."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * cycles_per_s(device)))


def leave(group: Group) -> None:
    """Until its abort has come back."""
    process_group.leave(group)
    wait_for_abort(group)


def wait_for_abort(group: Group) -> float:
    """Of a group that was left; gives the seconds."""
    began = time.monotonic()
    aborting = getattr(group, "_aborting", None)
    if aborting is not None:
        aborting.join(JOIN_S)
    return time.monotonic() - began
