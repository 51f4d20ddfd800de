"""Training of the rig of tests/workers/sharded_rig.py on simulated devices, ranks as threads."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tests.device import device as simulated
from tests.device.ranks import Meeting
from tests.workers import sharded_rig as rig
from tests.workers.fake_groups import ThreadGroup, run_threads
from workers.distributed.device_mesh import Unconnected
from workers.distributed.process_group import Alone, AnyGroup
from workers.parallel.strategy import Strategy

_host_generator = threading.Lock()
"""Ranks are threads, and the host's generator is of the process."""


def build(rank: int, parallel: str, reduction: str, work: rig.Work, **options: Any) -> Any:
    with _host_generator:
        where = torch.device("sim", rank)
        return rig.build(parallel, reduction, work, device=where, **options)


def enter(strategy: Strategy, group: AnyGroup, step: int, generation: int = 1) -> None:
    rig.enter(strategy, group, step, generation=generation)


def train(
    strategy: Strategy, group: AnyGroup, parallel: str, num_steps: int, **options: Any
) -> None:
    where = torch.device("sim", simulated.SIM.current_device())
    rig.train(strategy, group, parallel, num_steps, device=where, **options)


def trained_on_device(
    rank: int,
    meeting: Meeting,
    world_size: int,
    parallel: str,
    reduction: str,
    num_steps: int,
    work: rig.Work,
    **options: Any,
) -> str:
    """One rank's hash of the weights after so many steps."""
    strategy = build(rank, parallel, reduction, work, **options)
    group = meeting.group(rank, world_size)
    enter(strategy, group, 0)
    train(strategy, group, parallel, num_steps, reduction=reduction, work=work)
    return rig.sha256(strategy)


class InThreads(ThreadGroup):
    """Of ranks as threads, on the host; its parts are all of it, or one rank."""

    def __init__(self, rank: int, mailboxes: Any) -> None:
        super().__init__(rank, mailboxes)
        self._for_torch = Unconnected(rank, len(mailboxes))
        self.register = self._for_torch.register

    @property
    def group_name(self) -> str:
        return self._for_torch.group_name

    def part(self, name: str, ranks: Sequence[int], timeout_s: float) -> Any:
        return Alone() if len(ranks) == 1 else self


def trained_on_cpu(world_size: int, parallel: str, reduction: str, num_steps: int) -> str:
    """The same on the host, over a group that adds in the order of ranks, too.

    Ranks share the host's generator: this is work that draws nothing once it is built.
    """

    def body(of_threads: ThreadGroup) -> str:
        group: Any = InThreads(of_threads.rank(), of_threads._mailboxes)
        with _host_generator:
            strategy = rig.build(parallel, reduction, rig.Dense(), clip_norm=None)
        rig.enter(strategy, group, 0)
        how: dict[str, Any] = {"reduction": reduction, "work": rig.Dense()}
        rig.train(strategy, group, parallel, num_steps, seed=lambda *_: None, **how)
        return rig.sha256(strategy)

    (found,) = set(run_threads(world_size, body))
    return found
