"""A run of very many workers, event by event; shared by the tests and tests/bench."""

from collections.abc import Iterator
from dataclasses import dataclass

from elastic.control.commands import Command, Form
from elastic.control.events import (
    Committed,
    Done,
    Ended,
    Event,
    Joined,
    Loaded,
    Suspended,
    Synced,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.state import Decision, Finished, Limits, Phase
from elastic.control.transition import start, transition
from elastic.protocol.mesh import DDP, Parallel

NODES = 750
"""With a worker of each in turn."""


@dataclass
class ManyWorkers:
    """Plays events into the decision core and keeps the commands."""

    size: int
    parallel: Parallel = DDP

    def __post_init__(self) -> None:
        self.limits = Limits(
            min_workers=self.size - 10,
            max_workers=self.size,
            standby=0,
            steps=100,
            max_failures=8,
            join_timeout_s=60,
            end_timeout_s=60,
            confirm_timeout_s=3,
            parallel=self.parallel,
        )
        self.decision = start(self.limits, 0.0)
        self.commands: list[Command] = list(self.decision.commands)

    @property
    def phase(self) -> Phase:
        return self.decision.phase

    def play(self, events: Iterator[Event]) -> None:
        for event in events:
            self.hear(event)

    def hear(self, event: Event) -> Decision:
        decision = transition(self.decision.ledger, self.decision.phase, event, self.limits)
        self.decision = decision
        self.commands += decision.commands
        return decision

    def last_form(self) -> Form:
        return next(c for c in reversed(self.commands) if isinstance(c, Form))

    def gather(self) -> None:
        """All have started; one loads, the others copy; the last Synced makes the first Form."""
        self.play(WorkerStarted(w, 1.0, f"node{w % NODES}") for w in range(self.size))
        self.hear(Loaded(0, 0, 2.0))
        self.play(Synced(w, 3.0) for w in range(1, self.size))

    def join(self, at: float) -> None:
        membership = self.last_form().membership
        self.play(
            Joined(membership.generation, rank, 0.0, at) for rank in range(membership.world_size)
        )

    def lose(self, worker: int, at: float) -> None:
        self.hear(WorkerLost(worker, "process_died", at, at))

    def answer(self, lost: int, step: int, at: float) -> None:
        """Every survivor of the generation says where it stands."""
        membership = self.last_form().membership
        for rank, worker in enumerate(membership.workers):
            if worker != lost:
                self.hear(Suspended(membership.generation, rank, step, False, False, at))

    def end(self, step: int, at: float) -> Finished:
        membership = self.last_form().membership
        ranks, generation = range(membership.world_size), membership.generation
        self.hear(Committed(generation, step, 0.1, at))
        self.play(Done(generation, rank, step, at) for rank in ranks)
        self.play(Ended(generation, rank, "ab", at) for rank in ranks)
        assert isinstance(self.phase, Finished)
        return self.phase
