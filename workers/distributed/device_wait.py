"""Waiting for a device by looking, so that whoever waits can be told to stop; and copies to the
host that keep nobody else waiting.

What a device's streams do meanwhile is torch's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from workers.distributed.captures import take_no_part

FIRST_S, LONGEST_S = 5e-5, 1e-3
"""Between two looks."""


def wait_for(event: torch.Event, check: Callable[[], object] = lambda: None) -> None:
    """Until the device has come to it. check: called between two looks and in the end; what it
    raises ends the wait."""
    pause_s = FIRST_S
    take_no_part()
    while not event.query():
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
    check()


def mark(device: torch.device) -> torch.Event | None:
    """What the current stream has yet to come to; None: the host does everything itself."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def to_host(tensor: Tensor, check: Callable[[], object]) -> Tensor:
    """In pinned memory, once the current stream has come to here. check: see `wait_for`."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    wait_for(torch.accelerator.current_stream(tensor.device).record_event(), check)
    return found


@dataclass(frozen=True, slots=True)
class Leaving:
    """A copy on its way to the host."""

    target: Tensor
    staged: Tensor | None = None
    """Where it comes to first: a device writes at once to pinned memory only."""
    came: torch.Event | None = None
    """None: it is there."""
    source: Tensor | None = None
    """Kept as long: what computes meanwhile must not be given its memory."""

    def wait(self) -> Tensor:
        if self.came is not None:
            wait_for(self.came)
        if self.staged is not None:
            self.target.copy_(self.staged)
        return self.target


class Exit:
    """By which tensors leave a device as they are now, beside what it computes. Any thread may send
    one off; what changes them comes behind `hold`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream_of(device)
        self._from = torch.accelerator.current_stream(device).record_event()
        self._last: torch.Event | None = None

    def leave(self, tensor: Tensor, target: Tensor) -> Leaving:
        """target: contiguous, on the host."""
        if not tensor.numel():
            return Leaving(target)
        take_no_part()
        staged = None if target.is_pinned() else torch.empty_like(target, pin_memory=True)
        with self._stream:
            self._stream.wait_event(self._from)
            (target if staged is None else staged).copy_(tensor, non_blocking=True)
            self._last = self._stream.record_event()
        return Leaving(target, staged, self._last, tensor)

    def hold(self) -> None:
        """The current stream goes on once all have left. The host does not wait."""
        if self._last is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._last)


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
