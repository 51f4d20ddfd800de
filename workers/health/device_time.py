"""How long a device has computed in a step, by its own events: the time of its stream between two
marks, without that in which the stream, or the host that feeds it, has waited for others.

The host is ahead of it and cannot know. Of a step on a CPU the host's time is all there is
(vitals.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceTime:
    """Of a step, from now on: its passes come on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.accelerator.current_stream(device)
        self._began, self._ended = self._mark(), None
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        self._waits_from: torch.Event | None = None

    def pause(self) -> None:
        """Until `resume` the host has nothing for the stream."""
        if self._ended is None and self._waits_from is None:
            self._waits_from = self._mark()

    def resume(self) -> None:
        if self._waits_from is not None:
            self._waits.append((self._waits_from, self._mark()))
            self._waits_from = None

    @contextmanager
    def waiting(self, *, is_host: bool) -> Iterator[None]:
        """Within, peers are waited for: by the host, or by the current stream alone, which may be
        another one than that of the passes."""
        is_paused = self._waits_from is not None
        if is_paused or not (is_host or self._is_here):
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def end(self) -> torch.Event:
        """What the device has yet to come to."""
        self.resume()
        self._ended = self._mark()
        return self._ended

    @property
    def seconds(self) -> float:
        """Once the device has come to the end."""
        assert self._ended is not None
        waited_ms = sum(begin.elapsed_time(end) for begin, end in self._waits)
        return (self._began.elapsed_time(self._ended) - waited_ms) / 1000

    @property
    def _is_here(self) -> bool:
        return torch.accelerator.current_stream(self._device) == self._stream

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream)
        return event


def device_time_of(device: torch.device) -> DeviceTime | None:
    """None: the host does everything itself."""
    return None if device.type == "cpu" else DeviceTime(device)
