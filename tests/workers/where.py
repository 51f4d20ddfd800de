"""Where the tests of training train: on the CPU, and again on the simulated device (tests/device),
in this process and in those of its ranks; or, with ELASTIC_TEST_DEVICE=cuda, on a GPU that all
ranks share (tests/gpu).

`HERE` is what `place`, the one parameter, says (conftest.py); the rigs take it where a test names
no device of its own. A hash is compared with one of the same place: the norm that clips has another
formula on a device (workers/reduction/norm.py). tests/device compares with the CPU's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu import older_torch
from tests.workers import fake_groups
from workers.distributed import backends, gloo
from workers.distributed.backends import with_control
from workers.distributed.nccl import formed
from workers.distributed.process_group import Connect, Group, GroupSpec
from workers.health import gpu

CPU = torch.device("cpu")
HOST = "127.0.0.1"
HERE = CPU
older_torch.allow()


def go_to(kind: str) -> None:
    """From now on HERE is a device of that kind, in this process."""
    global HERE
    if kind == "sim":
        from tests.device import device  # registers it: not where nobody asks for it

        torch.set_num_threads(1)
        device.reset()
    if kind == "cuda":
        gpu.make_deterministic()
    HERE = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    # Module.to() takes tied parameters apart on a device of PrivateUse1, as on no GPU.
    torch.__future__.set_swap_module_params_on_conversion(kind == "sim")


def of_rank(rank: int) -> torch.device:
    """Of a rank that is a thread of this process: autograd has one thread for each device."""
    if HERE.type == "cuda" and rank >= torch.cuda.device_count():
        pytest.skip(f"threads are ranks here, and rank {rank} needs a GPU of its own")
    return HERE if HERE.type == "cpu" else torch.device(HERE.type, rank)


def use(device: torch.device) -> None:
    """In this thread."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def current() -> torch.device:
    """Of this thread."""
    if HERE.type == "cpu":
        return HERE
    return torch.device(HERE.type, torch.accelerator.current_device_index())


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within: HERE is the CPU, whose hash is wanted."""
    global HERE
    before, HERE = HERE, CPU
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        HERE = before
        torch.__future__.set_swap_module_params_on_conversion(before.type == "sim")


def run_threads(world_size: int, body: Callable[[Any], Any]) -> list[Any]:
    """body(group) on ranks that are threads, each with a device of its own; the results in rank
    order. The group is one that copies (fake_groups.py), and on devices that of a generation."""
    if HERE.type != "sim":
        return fake_groups.run_threads(world_size, body)
    from tests.device import ranks

    results = ranks.run_ranks(world_size, lambda rank, at: body(at.group(rank, world_size)))
    return ranks.all_good(results)


def run_exchanging(world_size: int, body: Callable[[Any], Any]) -> list[Any]:
    """As `run_threads`, of bodies whose backwards exchange: autograd has one thread for each GPU,
    and the first rank's backward would wait in it for ever."""
    of_rank(world_size - 1)
    return run_threads(world_size, body)


def leave() -> None:
    """Back to the CPU. AssertionError if a rule of the device was broken: a race, a touch by the
    host, ranks that have launched different collectives."""
    if HERE.type == "sim":
        from tests.device import device

        device.release()
        device.check()
    go_to("cpu")


def at(place: torch.device) -> AbstractContextManager[None]:
    """Within: HERE is that: the CPU, or what it is anyway."""
    return on_cpu() if place.type == "cpu" else nullcontext()


def store_of_parts() -> Any:
    """Over which the communicators of simulated processes meet, and send; else None."""
    if HERE.type != "sim":
        return None
    from tests.device.parts import PartsServer

    return PartsServer()


def connect_here(parts: str) -> Connect:
    """What connects ranks that are processes, and share a GPU if there is one. parts: the address
    of the store of parts."""
    if HERE.type == "cuda":
        return backends.connect_staged(HOST)
    if HERE.type == "cpu":
        return backends.connect_for(HERE, HOST)
    return with_control(partial(_data, parts), partial(gloo.connect, HOST))


def connecting_threads() -> Callable[[torch.device, str], Connect]:
    """What connects the ranks of one test that are threads, in place of the product's `connect_for`
    (workers/distributed/backends.py), which knows of no simulated device."""
    if HERE.type == "cpu":
        return backends.connect_for
    if HERE.type == "cuda":
        return lambda device, host: backends.connect_staged(host)
    from tests.device import ranks

    meeting = ranks.Meeting()

    def connect_for(device: torch.device, host: str) -> Connect:
        def data(spec: GroupSpec) -> Group:
            torch.sim.set_device(device)
            return meeting.data(device, spec.name, spec)

        return with_control(data, partial(ranks.control, device))

    return connect_for


def _data(parts: str, spec: GroupSpec) -> Group:
    from tests.device.nccl_group import SimulatedNccl
    from tests.device.parts import Parts

    def connect() -> Any:
        return Parts(parts, spec.name)

    torch.sim.set_device(HERE)
    nccl = SimulatedNccl(connect, spec.rank, spec.world_size, device=HERE)
    nccl.begin_connect(HERE)
    return formed(nccl, HERE, spec)
