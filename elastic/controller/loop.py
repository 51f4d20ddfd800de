"""The controller's loop: execute, await, decide, record. What is decided is in elastic/control."""

from collections.abc import Callable
from typing import Protocol

from elastic.control.commands import Command
from elastic.control.events import Adopted, Event
from elastic.control.state import Decision, Finished, Ledger, Limits, Phase
from elastic.control.transition import start, transition

Record = Callable[[Event | None, Decision], None]
"""Told of every event and its decision before it is executed; the first one has no event."""


class Cluster(Protocol):
    async def execute(self, command: Command) -> None:
        """Have it done; must not wait for workers, whose answers are events."""
        ...

    async def next_event(self) -> Event:
        """The next thing that happened; a Tick at least every second."""
        ...


async def control(
    cluster: Cluster,
    limits: Limits,
    record: Record,
    at: float,
    taken_over: tuple[Ledger, Phase, Adopted] | None = None,
    earlier_generations: int = 0,
) -> Finished:
    """Until the run is over.

    earlier_generations: the newest one that the run directory knows of.
    taken_over: what the journal of a controller that died says, and who introduced himself.
    """
    event, decision = None, start(limits, at, earlier_generations)
    if taken_over is not None:
        ledger, phase, event = taken_over
        decision = transition(ledger, phase, event, limits)
    while True:
        record(event, decision)
        for command in decision.commands:
            await cluster.execute(command)
        if isinstance(decision.phase, Finished):
            return decision.phase
        event = await cluster.next_event()
        decision = transition(decision.ledger, decision.phase, event, limits)
