"""Ranks as threads of this process, each on a simulated device of its own, with NCCL's manners.

A rank gets the group that a generation has (workers/distributed/process_group.py): its data goes
over a `SimulatedNccl`, its control over gloo.
"""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from tests.device.device import SIM
from tests.device.nccl_group import SimulatedNccl
from workers.distributed import gloo, staged
from workers.distributed.backends import with_control
from workers.distributed.nccl import formed
from workers.distributed.process_group import Alone, Formation, Group, GroupSpec

DEADLINE_S = 240.0
HOST = "127.0.0.1"
_prefixes = itertools.count()


class Meeting:
    """Where the ranks of one test find each other."""

    def __init__(self, *, is_staged: bool = False) -> None:
        """is_staged: data goes through host memory and gloo (workers/distributed/staged.py)."""
        self._is_staged = is_staged
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=0.05))
        self._of_gloo: Any = HashStore()
        self._prefix = next(_prefixes)

    def nccl(
        self,
        rank: int,
        world_size: int,
        generation: Any = 1,
        where: torch.device | None = None,
    ) -> SimulatedNccl:
        prefix, where = f"{self._prefix}/{generation}", where or torch.device("sim", rank)
        return SimulatedNccl(
            lambda: PrefixStore(prefix, self._store), rank, world_size, device=where
        )

    def group(self, rank: int, world_size: int, generation: Any = 1) -> Group:
        """The group of that generation on device `rank`. Waits for the others."""
        if world_size == 1:
            return Alone()
        return self.form(rank, world_size, generation, torch.device("sim", rank)).wait(DEADLINE_S)

    def form(self, rank: int, world_size: int, name: Any, where: torch.device) -> Formation:
        """Begin to form it as a worker does."""

        def build(given_up: threading.Event) -> Group:
            torch.sim.set_device(where)
            store: Any = self._of_gloo
            limits = {"join_timeout_s": DEADLINE_S, "operation_timeout_s": DEADLINE_S}
            full_name = f"{self._prefix}/{name}"
            spec = GroupSpec(store, full_name, rank, world_size, given_up=given_up, **limits)
            nccl, through_host = partial(self.data, where, name), partial(staged.connect, HOST)
            data = through_host if self._is_staged else nccl
            connect = with_control(data, partial(control, where))
            group = connect(spec)
            group.form_part = lambda part, r, size: self.form(r, size, f"{name}/{part}", where)
            return group

        return Formation(build)

    def data(self, where: torch.device, name: Any, spec: GroupSpec) -> Group:
        """A backend's `connect`."""
        nccl = self.nccl(spec.rank, spec.world_size, name, where)
        nccl.begin_connect(where)
        return formed(nccl, where, spec)


def control(where: torch.device, spec: GroupSpec) -> Group:
    """A backend's `connect`. The device runs while its host waits in here, as it always does."""
    group = gloo.connect(HOST, spec)
    finish = group.finish

    def finish_while_the_device_runs(pending: Any) -> None:
        SIM.note_wait(where.index, 1)
        try:
            finish(pending)
        finally:
            SIM.note_wait(where.index, -1)

    group.finish = finish_while_the_device_runs
    return group


def run_ranks(
    world_size: int, body: Callable[[int, Meeting], Any], *, is_staged: bool = False
) -> list[Any]:
    """body(rank, meeting) in a thread each, whose current device is its own; the results, in which
    an exception stands for the body that has raised it."""
    meeting, results = Meeting(is_staged=is_staged), [None] * world_size

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
    raised = [result for result in results if isinstance(result, Exception)]
    assert not any(t.is_alive() for t in threads), f"a rank has not come back; others: {raised}"
    return results


def all_good(results: list[Any]) -> list[Any]:
    """The same; raises the first rank's exception."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
