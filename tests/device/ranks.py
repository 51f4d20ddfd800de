"""Ranks as threads of this process, each on a simulated device of its own, with NCCL's manners.

A rank gets the group that a generation has (workers/distributed/process_group.py), whose backend is
a `SimulatedNccl`.
"""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from tests.device.nccl_group import SimulatedNccl
from workers.distributed.nccl import NcclGroup
from workers.distributed.process_group import Alone, Group

DEADLINE_S = 60.0
_prefixes = itertools.count()


class Meeting:
    """Where the ranks of one test find each other."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=0.05))
        self._prefix = next(_prefixes)

    def nccl(self, rank: int, world_size: int, generation: int = 1) -> SimulatedNccl:
        prefix = f"{self._prefix}/{generation}"
        where = torch.device("sim", rank)
        return SimulatedNccl(
            lambda: PrefixStore(prefix, self._store), rank, world_size, device=where
        )

    def group(self, rank: int, world_size: int, generation: Any = 1) -> Group:
        """The group of that generation on device `rank`. Waits for the others."""
        if world_size == 1:
            return Alone()
        nccl = self.nccl(rank, world_size, generation)
        nccl.eager_connect_single_device(torch.device("sim", rank))
        group = NcclGroup(nccl, rank, world_size)
        group.form_part = lambda name, r, size: _Formed(
            self, torch.device("sim", rank), f"{generation}/{name}", r, size
        )
        return group


class _Formed:
    """Stands for the formation of a part: a group that is there already when it is waited for."""

    def __init__(
        self, meeting: Meeting, where: torch.device, name: str, rank: int, size: int
    ) -> None:
        self._nccl = meeting.nccl(rank, size, name)
        self._where, self._rank, self._size = where, rank, size

    def wait(self, timeout_s: float) -> Group:
        self._nccl.eager_connect_single_device(self._where)
        return NcclGroup(self._nccl, self._rank, self._size)

    def abandon(self) -> None:
        self._nccl.abort()


def run_ranks(world_size: int, body: Callable[[int, Meeting], Any]) -> list[Any]:
    """body(rank, meeting) in a thread each, whose current device is its own; the results, in which
    an exception stands for the body that has raised it."""
    meeting, results = Meeting(), [None] * world_size

    def run(rank: int) -> None:
        torch.sim.set_device(rank)
        try:
            results[rank] = body(rank, meeting)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank has not come back"
    return results


def all_good(results: list[Any]) -> list[Any]:
    """The same; raises the first rank's exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
