"""How far the run has come: its steps and evaluations, as members say them and on record.

When a step counts is commits.py's, what the record is elastic/controller/recorder.py's.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from elastic.control import events as e
from elastic.on_ray.cluster_view import Record
from elastic.on_ray.record.commits import Commits
from elastic.on_ray.record.evaluations import Evaluations
from elastic.protocol.messages import to_controller as r

log = logging.getLogger(__name__)
SETTLE_S = 2.0
"""Storage that answers takes steps in less."""


class Progress:
    """Steps in order, each taken once: after a regroup, or over another connection, the lowest
    rank may repeat some."""

    def __init__(
        self, record: Record, say: Callable[[e.Event], None], now: Callable[[], float]
    ) -> None:
        self._record, self._say, self._now = record, say, now
        self.recorded_step = 0
        self.recorded_generation: int | None = None
        """Of the last line on record, once that is known."""
        self.members: frozenset[int] = frozenset()
        """Of the newest generation that was told to form."""
        self.commits = Commits(self._record_step)
        self.evaluations = Evaluations(partial(record.note, "evaluation"))

    @property
    def safe_step(self) -> int:
        """On record, and the record does not die with this process."""
        return min(self.recorded_step, self._record.safe_step)

    def is_unknown_to(self, workers: tuple[int, ...]) -> bool:
        """None of them was a member: newcomers alone could report no step that storage has not, and
        would begin behind it."""
        return self.recorded_step > 0 and not self.members.intersection(workers)

    async def settle(self) -> None:
        """What is on record is in storage, unless that is away."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._record.settle(), SETTLE_S)

    def hear_joined(self, report: r.Joined) -> None:
        """The generation may begin behind the record: later steps are lost."""
        is_first = self.commits.hear_joined(report.generation)
        has_recorded = (self.recorded_generation or 0) >= report.generation
        if is_first and not has_recorded and report.step < self.recorded_step:
            self._roll_back(report.step)

    def hear_suspended(self, worker: int, report: r.Suspended) -> None:
        self.commits.keep_vote(report.step, report.origin, report.vote, report.payload)
        self.evaluations.hear_last(worker, report.evaluation)

    def _record_step(self, generation: int, line: dict[str, Any]) -> None:
        step, step_s = line["metrics"]["step"], line["metrics"]["step_s"]
        done_by, last = line["metrics"]["generation"], self.recorded_generation
        if step <= self.recorded_step and last is not None and done_by > last:
            self._roll_back(step - 1)  # so has a controller that died before storage heard of it
        if step == self.recorded_step + 1:
            self.recorded_step, self.recorded_generation = step, done_by
            self._record.record_step(line)
            has_vote = self.commits.knows_vote_of(step, done_by)
            idle_s = round(line.get("idle_s", 0.0), 6)
            said = e.Committed(generation, step, step_s, self._now(), done_by, has_vote, idle_s)
            self._say(said)
        elif step > self.recorded_step:
            log.error('step=%d reason="step %d is not on record"', step, self.recorded_step + 1)

    def _roll_back(self, step: int) -> None:
        self.evaluations.go_back(step)
        self.recorded_step = step
        self._record.roll_back(step)
