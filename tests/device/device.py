"""The simulated device as `torch.sim`, and what a test asks of it: races, touches, counters.

Importing this module builds and registers the device (README.md); the group is nccl_group.py.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tests.device.build import load

SIM = load()
NUM_DEVICES = 8
PID = os.getpid()
"""A fork of this process has no device, as with CUDA."""


class HostTouched(RuntimeError):
    """Host code has read or written memory of the device; `host_touches()` tells where."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one device since the last `reset_counters`."""

    host_syncs: int
    """How often the host has waited for the device."""
    syncs_by_reason: dict[str, int]
    kernels: int
    collectives: int
    pageable_d2h_bytes: int
    pinned_d2h_bytes: int
    h2d_bytes: int
    live_bytes: int
    peak_bytes: int
    unqueued: dict[str, int]
    """Operations whose shapes depend on contents: the simulation waits in them, where a
    GPU's host runs on."""
    busy_s: float


def counters(device: int = 0) -> Counters:
    return Counters(**SIM.counters(device))


def reset_counters(device: int = 0) -> None:
    SIM.reset_counters(device)


races: Callable[[], list[str]] = SIM.races
"""The accesses that no event orders, since the last call."""
host_touches: Callable[[], list[str]] = SIM.host_touches
"""Where host code has touched device memory, or pinned memory too early; since the last call."""
desyncs: Callable[[], list[str]] = SIM.desyncs
"""Where ranks have launched different collectives against each other."""


def check() -> None:
    """AssertionError if a rule of the device was broken since the last time somebody looked."""
    broken = [*races(), *host_touches(), *desyncs()]
    assert not broken, broken


def slow(name: str, seconds: float, device: int = 0, skip: int = 0, count: int = 1) -> None:
    """The next `count` kernels with `name` in theirs, after `skip` of them, end so much later."""
    SIM.add_rule(device, name, seconds, skip, count)


def stick(name: str, device: int = 0, skip: int = 0) -> None:
    """The next kernel with `name` in its name never ends, until `release`."""
    SIM.add_rule(device, name, -1.0, skip, 1)


def release() -> None:
    """Kernels that are stuck go on; nothing is slow any more."""
    SIM.clear_rules()


def fail(text: str, code: int = 999, device: int = 0) -> None:
    """From now on whatever is asked of the device raises torch.AcceleratorError, as of a GPU that
    has fallen off the bus."""
    SIM.fail(device, text, code)


def limit_memory(num_bytes: int | None, device: int = 0) -> None:
    """torch.OutOfMemoryError where more would be in use."""
    SIM.set_capacity(device, num_bytes)


@contextmanager
def far_ahead() -> Iterator[None]:
    """The devices run only while a host thread waits for them: hosts are as far ahead as they
    can be, and nothing has been sent before somebody waits."""
    SIM.run_only_while_waited_for(True)
    try:
        yield
    finally:
        SIM.run_only_while_waited_for(False)


@contextmanager
def before_host_waits(told: Callable[[int, str], None]) -> Iterator[None]:
    """told(device, reason) is called in the thread that is about to wait for its device."""
    SIM.on_host_wait(told)
    try:
        yield
    finally:
        SIM.on_host_wait(None)


def reset() -> None:
    """As at the start, but for memory that is in use, and this thread on the first device. Nothing
    may be queued any more."""
    SIM.reset()
    SIM.exchange_device(0)
    host_touches()


# --- torch.sim ---------------------------------------------------------------------------------
def _index(device: Any) -> int:
    if device is None:
        return SIM.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return SIM.current_device() if index is None else index


@contextmanager
def _device(device: Any) -> Iterator[None]:
    before = SIM.exchange_device(_index(device))
    try:
        yield
    finally:
        SIM.exchange_device(before)


@contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    SIM.set_generator_state(_index(device), state)


def _seed_current(seed: int) -> None:
    """Not all devices, as with CUDA: ranks may be threads of one process."""
    SIM.seed(SIM.current_device(), seed)


def _module() -> ModuleType:
    """What torch and FSDP2 ask of torch.cuda. Generators are of the CPU's kind, as the bits are."""
    sim: Any = ModuleType("torch.sim")
    sim.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device("sim", _index(device)), priority=priority
    )
    sim.Event = lambda **options: torch.Event("sim", **options)
    sim.stream, sim.device = _stream, _device
    sim.current_stream = lambda device=None: torch.accelerator.current_stream(
        torch.device("sim", _index(device))
    )
    sim.current_device = SIM.current_device
    sim.set_device = lambda device: SIM.exchange_device(_index(device)) and None
    sim.synchronize = lambda device=None: SIM.synchronize(_index(device))
    sim.device_count = lambda: NUM_DEVICES
    sim.is_available = lambda: True
    sim.is_initialized = lambda: os.getpid() == PID
    sim._initialized = True  # else a recomputed block would draw other numbers
    sim._is_in_bad_fork = lambda: False
    sim._lazy_init = lambda: None
    sim.manual_seed = sim.manual_seed_all = _seed_current
    sim.get_rng_state = lambda device=None: SIM.generator_state(_index(device))
    sim.set_rng_state = _set_rng_state
    sim.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return sim


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _module())
SIM.set_touch_error(HostTouched)
SIM.install()
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
