"""A ledger, limits and events to play a transition with."""

from elastic.control.commands import (
    Command,
)
from elastic.control.events import (
    Event,
    Suspended,
    WorkerLost,
)
from elastic.control.state import (
    Ledger,
    Limits,
    Phase,
)
from elastic.control.transition import transition
from elastic.protocol.membership import Membership, NumberSet

LIMITS = Limits(
    min_workers=2,
    max_workers=3,
    standby=0,
    steps=100,
    max_failures=2,
    join_timeout_s=30,
    end_timeout_s=30,
    confirm_timeout_s=3,
)
ABC = Membership(7, (0, 1, 2))
LEDGER = Ledger(generation=7, step=40, next_worker=3)


def some(*numbers: int) -> NumberSet:
    return NumberSet.of(numbers)


def play(ledger: Ledger, phase: Phase, *events: Event, limits: Limits = LIMITS):
    commands: list[Command] = []
    for event in events:
        ledger, phase, new, _ = transition(ledger, phase, event, limits)
        commands += new
    return ledger, phase, commands


def lost(worker: int, at: float = 9.0) -> WorkerLost:
    return WorkerLost(worker, "process_died", at - 0.1, at)


def suspended(rank: int, step: int, *, prepared: bool = False, between: bool = False, at=9.0):
    return Suspended(7, rank, step, prepared, between, at)
