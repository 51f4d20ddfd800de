"""A simulated newcomer's copy of its source's state, as workers/membership/joining.py has it."""

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from elastic.protocol.step_record import KnownSteps
from workers.membership import actions as a
from workers.membership import events as e

if TYPE_CHECKING:
    from tests.control.fake_process import Process

JOIN_S = 60.0
Turns: TypeAlias = Generator[None, None, None]
Work: TypeAlias = Generator[None, None, e.Event | None]


class Copied(NamedTuple):
    """What a source sends: its state, or a step's change of it."""

    is_state: bool
    step: int
    origin: int
    weights: int
    records: KnownSteps


class Copying:
    """At most one source at a time."""

    def __init__(self, by: "Process") -> None:
        self.by = by
        self.source: Process | None = None
        self.received: deque[Copied] = deque()
        self.is_lagging = self.is_copying = self.is_ahead = False

    def start(self, action: a.Follow | a.CopyAhead) -> e.Event | None:
        if isinstance(action, a.CopyAhead):  # nobody counts on it: nothing of it is kept here
            self.is_ahead = True
            return None
        address = action.address
        self.source = None if address is None else self.by.cluster.workers.get(address[1])
        if self.source is None or not self.source.is_alive:
            return e.SourceLost("cannot reach the source")
        self.by.has_complained = False
        self.is_copying, self.is_lagging = True, False
        return None

    def stop(self) -> None:
        """What was received stays, but not what is on its way."""
        self.source, self.is_lagging, self.is_copying = None, False, False
        self.is_ahead = False
        self.received.clear()

    def is_source_gone(self) -> bool:
        return self.source is None or not self.source.is_alive

    def look_around(self) -> Turns:
        """At a boundary: what the source has sent is taken over."""
        if self.is_ahead and self.by.rng.random() < 0.3:
            is_over = self.by.rng.random() < 0.5
            self.is_ahead = not is_over
            yield from self.by.tell(e.SourceLost("gone") if is_over else e.CopyLevel())
        yield from self.apply_received()
        if self.source is None:
            return
        may_fail, faults = self.is_copying, self.by.cluster.faults
        is_cut = may_fail and faults.sync_failures > 0 and self.by.rng.random() < 0.2
        faults.sync_failures -= is_cut
        if not self.received and (is_cut or self.is_source_gone()):
            yield from self.by.tell(e.SourceLost("source is gone"))

    def receive(self) -> None:
        """The source takes this worker on, at a boundary of its own or between two steps."""
        source = self.source
        if source is None or not self.is_copying or self.is_source_gone() or not source.holds:
            return
        if source.is_applying:  # at no boundary: the step's change has gone out, its state has not
            return
        if self.by.rng.random() < 0.4:
            self.is_copying = False
            self.received.append(source.state_of())
            self.is_lagging = self.by.rng.random() < self.by.cluster.faults.lags

    def apply_received(self) -> Turns:
        self.receive()
        while self.received:
            copied = self.received.popleft()
            if copied.is_state:
                self.by.weights = copied.weights
                self.by.records.forget()
                self.by.records.take(copied.records)
                yield from self.by.tell(e.StateReplaced(copied.step, copied.origin))
            elif copied.step == self.by.step + 1:
                self.by.weights = copied.weights
                self.by.records.take(copied.records)
                yield from self.by.tell(e.StepFollowed(copied.step, copied.origin))
            if not self.received and not self.is_copying:
                yield from self.by.tell(e.CopyLevel())

    def catch_up(self, step: int, origin: int) -> Work:
        self.by.at, deadline = "pool", self.by.cluster.now + JOIN_S
        while not (self.stands_at(step, origin) or self.is_lagging):
            if self.received or self.is_copying:
                yield from self.apply_received()
            is_lost = self.is_source_gone() or self.by.cluster.now > deadline
            is_past = self.by.step >= step and not self.stands_at(step, origin)
            if not self.received and (is_lost or is_past) and not self.is_lagging:
                return e.CatchUpFailed(f"stands at step {self.by.step}, cannot reach {step}")
            if self.by.machine.is_given_up:
                break
            yield
        return e.CaughtUp()

    def stands_at(self, step: int, origin: int) -> bool:
        return (self.by.step, self.by.origin) == (step, origin)

    def catch_up_late(self, step: int, origin: int) -> Work:
        self.by.at = "pool"
        while not self.stands_at(step, origin):
            yield from self.apply_received()
            if self.stands_at(step, origin):
                break
            if self.by.is_abandoned or (not self.received and self.is_source_gone()):
                return e.CatchUpFailed(f"stands at step {self.by.step}, cannot reach {step}")
            yield
        return e.StateEntered(step)
