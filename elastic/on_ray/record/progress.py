"""How far the run has come: its steps and evaluations, as members say them and on record.

What the record is, is elastic/controller/recorder.py's.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elastic.control import events as e
from elastic.on_ray.cluster_view import Record
from elastic.on_ray.record.evaluations import Evaluations
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages.to_worker import Word
from elastic.protocol.step_record import StepRecord, VoteHead

log = logging.getLogger(__name__)
SETTLE_S = 2.0
"""Storage that answers takes steps in less."""
RecordStep = Callable[[int, StepRecord], None]


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

    def word(self) -> Word:
        """To a worker: how far all is on record."""
        return Word(self.safe_step, self.commits.formed, self._record.safe_applied)

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

    def _record_step(self, generation: int, record: StepRecord) -> None:
        step, step_s = record.step, record.metrics.step_s
        done_by, last = record.metrics.generation, self.recorded_generation
        if step <= self.recorded_step and last is not None and done_by > last:
            self._roll_back(step - 1)  # so has a controller that died before storage heard of it
        if step == self.recorded_step + 1:
            self.recorded_step, self.recorded_generation = step, done_by
            self._record.record_step(record)
            has_vote = self.commits.knows_vote_of(step, done_by)
            idle_s = round(record.idle_s, 6)
            at = self._now()
            self._say(e.Committed(generation, step, step_s, at, done_by, has_vote, idle_s=idle_s))
        elif step > self.recorded_step:
            log.error('step=%d reason="step %d is not on record"', step, self.recorded_step + 1)

    def _roll_back(self, step: int) -> None:
        self.evaluations.go_back(step)
        self.recorded_step = step
        self._record.roll_back(step)


class Commits:
    """Steps that members have voted for, until they go on record: one generation at a time, and
    the newest vote.

    Where shards are kept in peer memory, a step is committed once every rank's copy of it is held:
    else the loss of a rank could take a recorded step along.
    """

    def __init__(self, record: RecordStep) -> None:
        """record: takes (generation, step); it knows what it has already."""
        self._record = record
        self._generation, self._world_size = 0, 0
        self._steps: list[StepRecord] = []
        self._held: dict[int, int] = {}  # rank -> step
        self.vote: tuple[tuple[int, int], VoteHead, bytes] | None = None
        """The newest completed one: step and the generation that did it, head, content."""
        self.formed = 0
        """The newest generation that has said so."""
        self._given_up = 0
        """Generations up to this one report nothing any more."""
        self._ending = 0
        """The generation whose members write the final state."""

    def keep_vote(self, step: int, origin: int, head: VoteHead | None, content: bytes) -> None:
        if head is not None and (self.vote is None or (step, origin) >= self.vote[0]):
            self.vote = ((step, origin), head, content)

    def is_news(self, generation: int) -> bool:
        """What is said of it is not older than what others have said of a later one."""
        return generation >= max(self.formed, self._given_up)

    def knows_vote_of(self, step: int, origin: int) -> bool:
        return self.vote is not None and self.vote[0] == (step, origin)

    def vote_of(self, step: int, origin: int) -> tuple[VoteHead, bytes]:
        """What rolls those forward to `step` who did not see its vote complete."""
        assert self.vote is not None
        assert self.vote[0] == (step, origin), (self.vote[0], step, origin)
        return self.vote[1:]

    def hear(self, report: r.Committed) -> None:
        """Some of the steps may have been said before."""
        last = report.steps[-1].metrics
        self.keep_vote(last.step, last.generation, report.vote, report.payload)
        generation = report.generation
        if generation > self._given_up:  # whoever says Joined later does not begin it again
            self.formed = max(self.formed, generation)
        if not report.world_size or generation == self._ending:  # no loss of one takes it along
            for step in report.steps:
                self._record(generation, step)
            return
        if self._is_current(generation):
            self._world_size = report.world_size
            self._steps += report.steps
            self._pass_on()

    def hear_held(self, report: r.Held) -> None:
        """If there is no holder for it, backup/status.py tells."""
        if self._is_current(report.generation):
            self._held[report.rank] = max(report.step, self._held.get(report.rank, 0))
            self._pass_on()

    def hear_joined(self, generation: int) -> bool:
        """Whether this is the first word of a generation that it has formed."""
        is_first = self._is_current(generation) and generation != self.formed
        if is_first:
            self.formed = generation
        return is_first

    def end(self, generation: int) -> None:
        """Its members have stopped for good, and none did before its copy was held: what they say
        again is safe."""
        self._ending = generation

    def give_up(self, generation: int) -> None:
        """Its members may go back: what they have not committed for sure, their successors say."""
        self._given_up = max(self._given_up, generation)
        self._steps.clear()

    def _is_current(self, generation: int) -> bool:
        if generation <= self._given_up or generation < self._generation:
            return False
        if generation > self._generation:
            self._generation, self._world_size = generation, 0
            self._steps, self._held = [], {}
        return True

    def _pass_on(self) -> None:
        if not self._world_size or len(self._held) < self._world_size:
            return
        safe = min(self._held.values())
        while self._steps and self._steps[0].step <= safe:
            self._record(self._generation, self._steps.pop(0))
