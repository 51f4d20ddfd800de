"""Groups for tests: ranks as threads that exchange through queues, and ranks as gloo processes."""

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.forking import forking

DEADLINE_S = 240.0


class Done:
    is_settled = True

    def wait(self) -> None:
        return


class Flat:
    """The collectives of flat tensors, by those of lists."""

    is_abandoned = False
    _rank: int
    _size: int

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def control(self) -> Any:
        return self

    def read(self, result: Tensor) -> Tensor:
        return result.cpu()

    def check(self) -> None:
        assert not self.is_abandoned

    def device_waits_in(self) -> None:
        self.check()

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Any:
        return self.all_gather(output.chunk(self._size), tensor.clone())

    def all_to_all_flat(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> Any:
        equal = [tensor.numel() // self._size] * self._size
        received, sent = (
            output.split(list(out_sizes) or equal),
            tensor.split(list(in_sizes) or equal),
        )
        return self.all_to_all(received, sent)


class ThreadGroup(Flat):
    """One rank of a group of threads. Messages are copies, delivered in order per pair."""

    def __init__(self, rank: int, mailboxes: list[list["queue.Queue[Tensor]"]]) -> None:
        self._rank, self._size = rank, len(mailboxes)
        self._mailboxes = mailboxes  # [receiver][sender]

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Done:
        for receiver, tensor in enumerate(inputs):
            sent = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
            self._mailboxes[receiver][self._rank].put(sent)
        for sender, output in enumerate(outputs):
            received = self._mailboxes[self._rank][sender].get(timeout=DEADLINE_S)
            assert received.shape == output.shape
            output.copy_(received)
        return Done()

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Done:
        return self.all_to_all(outputs, [tensor] * self._size)

    def all_reduce(self, tensor: Tensor) -> Done:
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self.all_gather(parts, tensor)
        tensor.copy_(sum(parts[1:], parts[0]))
        return Done()


def run_threads(world_size: int, body: Callable[[ThreadGroup], Any]) -> list[Any]:
    """body(group) on every rank at once; its results in rank order."""
    mailboxes: list[list[queue.Queue[Tensor]]] = [
        [queue.Queue() for _ in range(world_size)] for _ in range(world_size)
    ]
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadGroup(rank, mailboxes))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


class GlooGroup(Flat):
    """One rank of a default gloo group."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        outputs[self._rank].copy_(inputs[self._rank])
        others = [r for r in range(self._size) if r != self._rank]
        works = [dist.isend(inputs[r], r) for r in others]
        works += [dist.irecv(outputs[r], r) for r in others]
        return _All(works)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Any:
        return dist.all_gather(list(outputs), tensor, async_op=True)

    def all_reduce(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, async_op=True)


class _All:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    @property
    def is_settled(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def run_gloo(world_size: int, folder: Path, body: Callable[[GlooGroup], Any]) -> list[Any]:
    """body(group) in one process per rank; its (picklable) results in rank order."""
    context = forking()
    pickled = cloudpickle.dumps(body)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=_gloo_rank, args=(r, world_size, folder, pickled, pipes[r][1]), daemon=True
        )
        for r in range(world_size)
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


def _gloo_rank(rank: int, world_size: int, folder: Path, pickled: bytes, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    sender.send(cloudpickle.loads(pickled)(GlooGroup()))
    dist.destroy_process_group()
