"""Ranks as real processes with the group that a generation has
(workers/distributed/process_group.py)."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch

from tests.workers import where
from tests.workers.forking import forking
from workers.distributed import process_group
from workers.distributed.process_group import Alone, Connect, Group
from workers.distributed.rendezvous import StoreServer
from workers.distributed.store import StoreClient

DEADLINE_S = 600.0
"""Processes that get what other tests leave of the machine (PATIENT in the Makefile); from one
`get_further` to the next."""


def run_ranks(
    num_ranks: int,
    body: Callable[["Ranks"], Any],
    on_pause: Callable[[], None] | None = None,
    killed: Sequence[int] = (),
) -> list[Any]:
    """body(ranks) in one process per rank; its (picklable) results in rank order, without those of
    the `killed`, which give none.

    on_pause: done here once every rank has called `ranks.pause()` or returned.
    """
    context = forking()
    server = StoreServer("127.0.0.1")
    address = ("127.0.0.1", server.port, server.secret)
    parts = where.store_of_parts()
    device = where.HERE.type, parts.address if parts else ""
    pickled = cloudpickle.dumps(body)
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=_run, args=(r, device, address, pickled, pipes[r][1]), daemon=True)
        for r in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    results = [_next(receiver) for r, (receiver, _) in enumerate(pipes) if r not in killed]
    if on_pause is not None:
        on_pause()
        store = StoreClient(address, DEADLINE_S)
        paused = [rank for rank, result in enumerate(results) if result == PAUSED]
        for rank in paused:
            store.set(f"resume/{rank}", "")
        for rank in paused:
            results[rank] = _next(pipes[rank][0])
    StoreClient(address, DEADLINE_S).set(OVER, "")
    for process in processes:
        process.join(DEADLINE_S)
    server.close()
    return results


def _next(receiver: Any) -> Any:
    while True:
        assert receiver.poll(DEADLINE_S), f"no result, and nothing new, in {DEADLINE_S} s"
        result = receiver.recv()
        if not (isinstance(result, str) and result == FURTHER):
            return result


PAUSED = "paused"
FURTHER, SAID_EVERY_S = "further", 10.0
OVER = "over"
"""All have told: what a rank still has to send goes with its process."""


class Ranks:
    """One process of the test: it forms a group for every generation that it is a member of."""

    def __init__(
        self, index: int, address: tuple[str, int, str], sender: Any, parts: str = ""
    ) -> None:
        self.index, self.address, self._sender = index, address, sender
        self._parts, self._said_at = parts, time.monotonic()

    def pause(self) -> None:
        """Wait until the test has done something."""
        self._sender.send(PAUSED)
        self._store().wait([f"resume/{self.index}"])

    def get_further(self) -> None:
        """The test waits for this process as long again: what it does takes long on a busy
        machine, but gets on. Said now and then: nobody may read it meanwhile."""
        if time.monotonic() - self._said_at > SAID_EVERY_S:
            self._said_at = time.monotonic()
            self._sender.send(FURTHER)

    def tell(self, result: Any) -> None:
        """What the test gets of this process, which is about to be killed."""
        self._sender.send(result)

    def once_said(self, key: str, react: Callable[[], None]) -> None:
        """In a thread, as a worker hears its controller."""

        def wait() -> None:
            self._store().wait([key])
            react()

        threading.Thread(target=wait, daemon=True).start()

    def meet(self, members: list[int]) -> None:
        """Wait for these, once, without a collective."""
        store = self._store()
        store.set(f"here/{self.index}", "")
        store.wait([f"here/{i}" for i in members])

    def say(self, key: str, value: str = "") -> None:
        self._store().set(key, value)

    def hear(self, key: str) -> str:
        """Wait until some rank says it."""
        return self._store().get(key).decode()

    def _store(self) -> StoreClient:
        return StoreClient(self.address, DEADLINE_S)

    def connect_here(self) -> Connect:
        """What connects the members of a generation (workers/distributed/backends.py)."""
        return where.connect_here(self._parts)

    def form(
        self, generation: int, members: list[int], operation_timeout_s: float = DEADLINE_S
    ) -> Group:
        """members: process indices in rank order, this one among them."""
        if len(members) == 1:
            return Alone()
        return process_group.form(
            store_address=self.address,
            prefix=f"{generation}",
            rank=members.index(self.index),
            world_size=len(members),
            connect=self.connect_here(),
            join_timeout_s=DEADLINE_S,
            operation_timeout_s=operation_timeout_s,
        ).wait(DEADLINE_S)


def _run(
    index: int,
    device: tuple[str, str],
    address: tuple[str, int, str],
    pickled: bytes,
    sender: Any,
) -> None:
    """device: the kind of the test's, and the address of parts (where.py)."""
    torch.set_num_threads(1)
    kind, parts = device
    where.go_to(kind)
    result = cloudpickle.loads(pickled)(Ranks(index, address, sender, parts))
    where.leave()
    sender.send(result)
    if kind != "cpu":
        StoreClient(address, DEADLINE_S).wait([OVER])
