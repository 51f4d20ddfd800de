"""What a worker shows of itself to its pulse process: step, phase and time, in shared memory.

The pulse (pulse.py) reads it without this process's GIL; nothing here sends anything.
"""

import os
import statistics
import struct
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from mmap import mmap
from typing import TYPE_CHECKING

from workers.health.anatomy import Anatomy

if TYPE_CHECKING:  # the pulse imports no torch
    from workers.health.device_time import DeviceTime

PHASES = (
    "starting",
    "pool",
    "data",
    "feed",
    "compute",
    "reduce",
    "vote",
    "apply",
    "evaluate",
    "save",
    "user",
    "form",
    "gather",
    "done",
    "compile",
    "restore",
    "exchange",
)
"""`pool`: between generations; `done`: likewise, but the user's loop has returned; `feed`: data
that others read is late; `user`: the user's code outside steps; `compute`: forward and backward;
`gather`: a sharded pass waits for its peers' part of a parameter or gradient; `restore`: a piece of
the state is read, initialised or copied, and the next one enters it again; `exchange`: it comes
from peers, or they are not as far. Who is in one of WAITING waits for its peers."""
NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

WAITING = ("reduce", "vote", "form", "gather", "exchange")
OWN = ("data", "compute")
"""A rank's own part of a step, in which it is as fast as its machine."""
IDLE = ("feed", "compile")
"""In which the host has nothing for its device, in the middle of the passes."""
FORMING = ("form", "restore", "exchange")
UNUSUAL = ("starting", "pool", "feed", "save", "user", "compile", *FORMING)
"""Phases without a usual time."""
UNEVEN = ("evaluate",)
"""Phases of which a few passes tell little about the next: it may be of much more data."""
COLLECTIVES = (
    "",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)
"""What workers/distributed/process_group.py tells of."""
LAYOUT = struct.Struct("<QqqIddqqIq24sqdd")
"""sequence, generation, step, phase, since (monotonic), p95 or -1, times that it is of; of the last
collective waited for: number, index in COLLECTIVES, elements, name of the part of the group;
own steps, own seconds per pass, those of them for data."""
SEQUENCE = struct.Struct("<Q")
SIZE_BYTES = 4096
ENOUGH = 8
"""Times through a phase that make its 95th percentile one."""
_WINDOW = 64
_OWN_WINDOW = 8


class Window:
    """The last times through a phase."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self.ordered: list[float] = []

    def add(self, time_s: float) -> None:
        if len(self._times) == _WINDOW:
            oldest = self._times.popleft()
            del self.ordered[bisect_left(self.ordered, oldest)]
        self._times.append(time_s)
        insort(self.ordered, time_s)

    @property
    def p95(self) -> float:
        """Their 95th percentile, seconds; there must be some."""
        return self.ordered[int(len(self.ordered) * 0.95)]


class OwnPart:
    """Of the steps: data and computation, in which a rank is as fast as its machine and its loader.
    Per micro-batch, the medians of the last steps."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.data_s = 0, 0.0, 0.0
        self._now: tuple[float, float] | None = (0.0, 0.0)
        """Of the step at hand, all and what of it was for data; None: a script tells its own."""
        self._last: deque[tuple[float, float]] = deque(maxlen=_OWN_WINDOW)

    def spend(self, phase: str, seconds: float) -> None:
        if phase in OWN and self._now is not None:
            own_s, data_s = self._now
            self._now = own_s + seconds, data_s + (seconds if phase == "data" else 0.0)

    def begin_step(self) -> None:
        self._now = None if self._now is None else (0.0, 0.0)

    def measure(self, own_s: float) -> None:
        """The device's own time of this step's passes, which the host was ahead of."""
        if self._now is not None:
            self._now = own_s, min(self._now[1], own_s)

    def end_step(self, num_microbatches: float) -> None:
        if self._now is not None:
            self._count(self._now[0] / num_microbatches, self._now[1] / num_microbatches)

    def tell(self, own_s: float, data_s: float) -> None:
        """Of a script's step: what the engine's steps around it take says nothing."""
        self._now = None
        self._count(own_s, data_s)

    def _count(self, own_s: float, data_s: float) -> None:
        self._last.append((own_s, data_s))
        self.steps += 1
        self.seconds, self.data_s = map(statistics.median, zip(*self._last, strict=True))


class Vitals:
    """Written by the main thread only; a sequence lock keeps readers from torn values."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: the pulse reads the same one."""
        self._clock = clock
        self.fd = os.memfd_create("vitals", 0)
        os.ftruncate(self.fd, SIZE_BYTES)
        self._memory = mmap(self.fd, SIZE_BYTES)
        self._sequence = 0
        self._seen = [Window() for _ in PHASES]
        self._phase, self._since = 0, clock()
        self._p95, self._num_seen = -1.0, 0
        self._collective = (0, 0, 0, b"")
        self.own = OwnPart()
        self.device_time: DeviceTime | None = None
        """Of the step at hand; None: the host does everything itself."""
        self.generation, self.step = 0, 0
        self.anatomy = Anatomy(clock)
        self._write()

    @property
    def phase(self) -> str:
        return PHASES[self._phase]

    def enter(self, phase: str) -> None:
        """The main thread goes on to `phase`."""
        now = self._clock()
        if phase != "pool":  # what is given up tells nothing of how long it takes
            self._seen[self._phase].add(now - self._since)
        self.own.spend(self.phase, now - self._since)
        self._pause_device(phase)
        self._phase, self._since = NUMBERS[phase], now
        self.anatomy.enter(phase, now)
        self._write()

    def begin_step(self, device_time: "DeviceTime | None" = None) -> None:
        """An attempt at a step. device_time: see above."""
        self.own.begin_step()
        self.device_time = device_time
        self.anatomy.begin(self.generation, self._clock())

    def end_step(self, num_microbatches: float) -> None:
        """This rank has done its own part, and goes on to what all do together. num_microbatches:
        so many whole ones took as long, 0 if it had no part. Its device has come to the end."""
        if self.device_time is not None:
            self.own.measure(self.device_time.seconds)
        self.own.end_step(num_microbatches or 1)

    def tell_own(self, own_s: float, data_s: float) -> None:
        """A script's own part of one of its steps took so long, and so much of that was for its
        data: what the engine's steps around it take says nothing."""
        self.own.tell(own_s, data_s)
        self._pack()

    def waits_in(self, number: int, collective: str, size: int, part: str = "") -> None:
        """The main thread waits for the collective of this number of its generation's group, or of
        a part of it, whose name the strategy has chosen."""
        if self.phase == "restore":
            self.enter("exchange")
        self._collective = (number, COLLECTIVES.index(collective), size, part.encode())
        self._pack()

    def device_waits(self, what: tuple[int, str, int, str] | None) -> None:
        """The host waits for its device, which waits for peers in this collective, or computes. The
        numbers of what devices wait in are not those of what hosts do: it is told as a part's."""
        phase = "compute" if what is None else "gather"
        if self.phase != phase:
            self.enter(phase)
        if what is not None:
            number, name, size, _ = what
            self.waits_in(number, name, size, "data")

    @contextmanager
    def waiting_for(self, phase: str) -> Iterator[None]:
        """Within, in the passes of a step: the host waits for its own device ("compute"), whose
        seconds are this rank's own, or for peers ("gather"); or a stream does alone ("stream")."""
        if self.phase not in ("compute", "gather"):
            yield
            return
        with self._device_waits_for(phase):
            if phase == "stream":
                yield
                return
            began = self._clock()
            with self.aside(phase):
                yield
            self.own.spend(phase, self._clock() - began)

    def _device_waits_for(self, phase: str) -> AbstractContextManager[None]:
        if self.device_time is None or phase == "compute":
            return nullcontext()
        return self.device_time.waiting(is_host=phase == "gather")

    def _pause_device(self, phase: str) -> None:
        """phase: that the host goes on to."""
        if self.device_time is not None:
            if phase in IDLE:
                self.device_time.pause()
            elif self.phase in IDLE:
                self.device_time.resume()

    def gathering(self) -> AbstractContextManager[None]:
        """Within: waiting for peers."""
        return self.aside("gather")

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Within: another phase in the middle of this one, whose time stands still."""
        phase, before, began = self._phase, self._since, self._clock()
        self._pause_device(name)
        self._phase, self._since = NUMBERS[name], began
        self.anatomy.enter(name, began)
        self._write()
        try:
            yield
        finally:
            now = self._clock()
            self._pause_device(PHASES[phase])
            self._seen[self._phase].add(now - began)
            self._phase, self._since = phase, before + now - began
            self.anatomy.enter(PHASES[phase], now)
            self._write()

    def _write(self) -> None:
        seen = self._seen[self._phase]
        phase, count = self.phase, len(seen.ordered)
        is_known = count >= (ENOUGH if phase in UNEVEN else 1)
        self._p95 = seen.p95 if is_known and phase not in UNUSUAL else -1.0
        self._num_seen = count
        if phase == "done":
            self._p95, self._num_seen = 0.0, ENOUGH  # nothing will come
        self._pack()

    def _pack(self) -> None:
        """Odd while the rest is written. Not with pack_into, which writes zeros first: a reader in
        that moment would take them for a process that has never begun."""
        packed = LAYOUT.pack(
            self._sequence,
            self.generation,
            self.step,
            self._phase,
            self._since,
            self._p95,
            self._num_seen,
            *self._collective,
            self.own.steps,
            self.own.seconds,
            self.own.data_s,
        )
        self._memory[:8] = SEQUENCE.pack(self._sequence + 1)
        self._memory[8 : LAYOUT.size] = packed[8:]
        self._sequence += 2
        self._memory[:8] = SEQUENCE.pack(self._sequence)
