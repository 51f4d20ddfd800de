"""Ranks as real processes with the group that a generation has (workers/groups.py)."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch.distributed import TCPStore

from workers import groups

DEADLINE_S = 120.0


def run_ranks(num_ranks: int, body: Callable[["Ranks"], Any]) -> list[Any]:
    """body(ranks) in one process per rank; its (picklable) results in rank order."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pickled = cloudpickle.dumps(body)
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=_run, args=(r, store.port, pickled, pipes[r][1]), daemon=True)
        for r in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    results: list[Any] = []
    for receiver, _ in pipes:
        assert receiver.poll(DEADLINE_S), f"no result in {DEADLINE_S} s"
        results.append(receiver.recv())
    for process in processes:
        process.join(DEADLINE_S)
    return results


class Ranks:
    """One process of the test: it forms a group for every generation that it is a member of."""

    def __init__(self, index: int, port: int) -> None:
        self.index, self._port = index, port

    def form(self, generation: int, members: list[int]) -> groups.AnyGroup:
        """members: process indices in rank order, this one among them."""
        if len(members) == 1:
            return groups.Alone()
        return groups.form(
            store_address=("127.0.0.1", self._port),
            prefix=f"{generation}",
            rank=members.index(self.index),
            world_size=len(members),
            host="127.0.0.1",
            device=torch.device("cpu"),
            join_timeout_s=60,
            operation_timeout_s=60,
        ).wait(60)


def _run(index: int, port: int, pickled: bytes, sender: Any) -> None:
    torch.set_num_threads(1)
    sender.send(cloudpickle.loads(pickled)(Ranks(index, port)))
