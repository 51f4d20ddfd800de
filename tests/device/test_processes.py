"""Ranks as processes: the same manners, with parts that travel through a store."""

import os
import signal
import time

import torch

from tests.device.nccl_group import SimulatedNccl
from tests.device.parts import Parts, PartsServer
from tests.workers.forking import forking

DEADLINE_S = 120.0


def connected(rank, address):
    device = torch.device("sim", 0)
    nccl = SimulatedNccl(lambda: Parts(address), rank, 2, device=device)
    nccl.eager_connect_single_device(device)
    return nccl


def sums(rank, address, sender):
    nccl, found = connected(rank, address), []
    for i in range(3):
        value = torch.tensor([float(rank + i)]).to(torch.device("sim", 0))
        nccl.allreduce([value]).wait()
        found.append(value.item())
    store = nccl._connect()
    store.set(f"done/{rank}", "done")
    for each in range(2):  # what it has to send goes with its process
        store.get(f"done/{each}")
    sender.send(found)


def loses_its_peer(rank, address, sender):
    nccl = connected(rank, address)
    value = torch.tensor([1.0]).to(torch.device("sim", 0))
    nccl.allreduce([value]).wait()
    first = value.item()
    sender.send("ready")
    if rank == 1:
        time.sleep(DEADLINE_S)  # until it is killed
    work = nccl.allreduce([value])
    work.wait()
    time.sleep(0.2)
    was_done = work.is_completed()
    nccl.abort()
    sender.send((first, was_done, value.view(torch.int32).item() & 0xFFFFFFFF))


def start(target):
    server = PartsServer()
    context = forking()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=target, args=(rank, server.address, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    return server, processes, [receiver for receiver, _ in pipes]


def told(receiver):
    assert receiver.poll(DEADLINE_S)
    return receiver.recv()


def test_processes_reduce_with_each_other():
    _server, processes, receivers = start(sums)
    assert [told(r) for r in receivers] == [[1.0, 3.0, 5.0]] * 2
    for process in processes:
        process.join(DEADLINE_S)


def test_a_killed_process_is_not_noticed_until_the_abort_leaves_garbage():
    _server, processes, receivers = start(loses_its_peer)
    assert [told(r) for r in receivers] == ["ready"] * 2
    os.kill(processes[1].pid, signal.SIGKILL)
    assert told(receivers[0]) == (2.0, False, 0xA5A5A5A5)
    for process in processes:
        process.join(DEADLINE_S)
