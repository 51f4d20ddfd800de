"""A snapshot leaves the device while it multiplies matrices: by which way, at what rate, and what
does it cost the multiplications? Then its source is written over: are the bytes whole?"""

import argparse
import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tests.gpu.experiment import Table, main
from tests.gpu.groups import HAS_GPU, device_of, synchronize
from workers.distributed.device_wait import Exit

GIGABYTES, TENSORS = 8, 64
MIN_RATE, MAX_SLOWER = 0.8, 0.02


def registered(num_bytes: int) -> Tensor:
    """Shared memory as the arenas of peer memory have it, told to CUDA."""
    file = os.memfd_create("a7")
    os.ftruncate(file, num_bytes)
    memory = mmap.mmap(file, num_bytes)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    if HAS_GPU:
        status = torch.cuda.cudart().cudaHostRegister(found.data_ptr(), num_bytes, 0)
        assert int(status) == 0, status
        assert ctypes.sizeof(ctypes.c_void_p) == 8
    return found


def products(device: torch.device, seconds: float) -> float:
    """Matrix products per second, queued for about so long."""
    size, kind = (8192, torch.bfloat16) if HAS_GPU else (256, torch.float32)
    left = torch.randn(size, size, device=device, dtype=kind)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for _ in range(10):
            left @ left
        synchronize(device)
        count += 10
    return count / (time.monotonic() - began)


def blocking(state: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(state, targets, strict=True):
        target.copy_(source)


def by_exit(state: list[Tensor], targets: list[Tensor]) -> None:
    way = Exit(state[0].device)
    leaving = [way.leave(s, t) for s, t in zip(state, targets, strict=True)]
    way.hold()
    for tensor in state:
        tensor.fill_(255)  # behind `hold`: it must not reach the copies
    for each in leaving:
        each.wait()


def rate(way: Callable[[list[Tensor], list[Tensor]], None], state: list[Tensor],
         targets: list[Tensor]) -> float:  # fmt: skip
    """Gigabytes per second, until all are there; what the device has yet to do is no part of it."""
    began = time.monotonic()
    way(state, targets)
    return sum(t.nbytes for t in state) / (time.monotonic() - began) / 1e9


def body(table: Table, arguments: argparse.Namespace) -> None:
    device = device_of()
    size = int(arguments.gigabytes * 1e9) // TENSORS
    state = [torch.full((size,), i, dtype=torch.uint8, device=device) for i in range(TENSORS)]
    alone = [torch.empty(size, dtype=torch.uint8, pin_memory=HAS_GPU) for _ in range(TENSORS)]
    arena = registered(size * TENSORS)
    pageable = [torch.empty(size, dtype=torch.uint8) for _ in range(TENSORS)]
    table.tell("pageable, alone", f"{rate(blocking, state, pageable):.1f} GB/s")
    pinned_rate = rate(blocking, state, alone)
    table.tell("pinned, alone", f"{pinned_rate:.1f} GB/s")
    undisturbed = products(device, arguments.seconds)
    for name, targets in (("pinned", alone), ("registered memfd", list(arena.split(size)))):
        for i, tensor in enumerate(state):
            tensor.fill_(i)
        synchronize(device)
        with ThreadPoolExecutor(1) as beside:
            copying = beside.submit(rate, by_exit, state, targets)
            meanwhile = products(device, arguments.seconds)
            copied = copying.result()
        table.at_least(f"{name}, beside products: of the pinned rate alone",
                       copied / pinned_rate, MIN_RATE)  # fmt: skip
        table.at_most(f"{name}: products slower by", 1 - meanwhile / undisturbed, MAX_SLOWER)
        whole = all(bool((t == i).all()) for i, t in enumerate(targets))
        table.holds(f"{name}: bytes are those before the source was written over", whole)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES)
    parser.add_argument("--seconds", type=float, default=5.0)


if __name__ == "__main__":
    sys.exit(main(body, options=options))
