"""What a worker knows of committed steps until the controller has them on record.

Every rank keeps it, the lowest reports it: should that one be lost, its successor says it again.
Who copies a state is told this with it, for it may be the last one that holds the step.
"""

import base64
import math
import time
from collections import deque
from dataclasses import replace

import numpy as np

from elastic.protocol.encoding import decode, encode, registry
from elastic.protocol.messages.to_controller import Committed
from elastic.protocol.step_record import (
    STEP_RECORD,
    KnownSteps,
    SampleRecord,
    StepMetrics,
    StepRecord,
    VoteHead,
)
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import AnyGroup
from workers.membership.link import ControllerLink
from workers.membership.state import Seat
from workers.step.vote import CompletedVote, Prepared, Vote


class Records:
    """Committed steps in order, and the vote of the last one."""

    def __init__(
        self, link: ControllerLink, global_batch: int, *, is_delayed: bool = False
    ) -> None:
        """is_delayed: the controller takes a step only once every rank has said that its copy of
        it is held."""
        self._link, self._global_batch, self._is_delayed = link, global_batch, is_delayed
        self._unrecorded: deque[StepRecord] = deque()
        self.last_vote: CompletedVote | None = None
        """Should we all be lost before others saw it complete, they can still apply the step."""
        self._waited_s = 0.0
        """In the step that was added last."""

    def add(self, step: int, prepared: Prepared, vector: np.ndarray, vote: Vote) -> None:
        """The step that is committed with this vote; `tell` reports it."""
        self.last_vote = CompletedVote.of(step, prepared.layout, vector)
        self._waited_s = vote.pace.waited_s
        self._unrecorded.append(record_of(step, prepared, vote, self._global_batch))
        self._drop_recorded()

    def complete(self, step: int, step_s: float, *, is_staged: bool = False) -> None:
        """How long the step took that was added last, now that it is over. is_staged: the model is,
        and stages wait for their neighbours."""
        if self._unrecorded and (last := self._unrecorded[-1]).step == step:
            bubble = round(min(self._waited_s / step_s, 1.0), 4) if is_staged else None
            metrics = replace(last.metrics, step_s=step_s, bubble=bubble)
            self._unrecorded[-1] = replace(last, metrics=metrics)

    def _drop_recorded(self) -> None:
        while self._unrecorded and self._unrecorded[0].step <= self._link.recorded_step:
            self._unrecorded.popleft()

    def known(self, *, is_newest_enough: bool = False) -> KnownSteps:
        """For who copies the state of the last step here; `take` is its other end.

        is_newest_enough: it has been told the steps before."""
        steps, vote = tuple(self._unrecorded), self.last_vote
        if is_newest_enough:
            steps = steps[-1:]
        if vote is None:
            return KnownSteps(steps, None)
        return KnownSteps(steps, vote.head, base64.b64encode(vote.content).decode())

    def take(self, known: KnownSteps) -> None:
        """What the source of a copied state knows."""
        self._unrecorded += known.steps
        self._drop_recorded()
        self.last_vote = vote_in(known)

    def share(self, group: AnyGroup) -> None:
        """All learn what the lowest rank knows. A collective. Raises PeerLost."""
        mine = encode(self.known()) if group.rank() == 0 else None
        self.learn(decode(gather_json(group, mine)[0], registry(*STEP_RECORD)))

    def learn(self, known: KnownSteps) -> None:
        """What the lowest rank knows: a newcomer may be the last one who can report those steps.
        Of a step that both know, its line counts: the state is the one that it could report."""
        steps = {record.step: record for record in (*self._unrecorded, *known.steps)}
        self._unrecorded = deque(steps[step] for step in sorted(steps))
        self._drop_recorded()
        if self.last_vote is None:
            self.last_vote = vote_in(known)

    def tell(self, seat: Seat) -> None:
        """Say what was committed last, as a member that has joined."""
        if self._unrecorded:
            self._say(seat, [self._unrecorded[-1]])

    def repeat(self, seat: Seat, recorded_step: int) -> None:
        """Say again what a lost lowest rank may not have said."""
        unknown = [r for r in self._unrecorded if r.step > recorded_step]
        if unknown:
            self._say(seat, unknown)

    @property
    def known_step(self) -> int:
        """Up to which this worker could report every step that is not on record."""
        return self.known_from(self._link.recorded_step)

    def known_from(self, recorded_step: int) -> int:
        """Up to which this worker could report every step behind `recorded_step`."""
        known = recorded_step
        for record in self._unrecorded:
            if record.step == known + 1:
                known += 1
        return known

    def vote_of(self, step: int) -> tuple[VoteHead | None, bytes]:
        """With its content; None if this worker does not know it (any more)."""
        vote = self.last_vote
        if vote is None or vote.head.step != step:
            return None, b""
        return vote.head, vote.content

    def go_back(self, step: int) -> None:
        """What came after `step` will be done again."""
        while self._unrecorded and self._unrecorded[-1].step > step:
            self._unrecorded.pop()
        if self.last_vote is not None and self.last_vote.head.step > step:
            self.last_vote = None

    def forget(self) -> None:
        """Another worker's state was taken over."""
        self._unrecorded.clear()
        self.last_vote = None

    def _say(self, seat: Seat, steps: list[StepRecord]) -> None:
        vote, content = self.vote_of(steps[-1].step)
        world_size = seat.world_size if self._is_delayed else 0
        self._link.send(Committed(seat.generation, world_size, tuple(steps), vote, content))


def record_of(step: int, prepared: Prepared, vote: Vote, global_batch: int) -> StepRecord:
    """Of the step that is committed with this vote."""
    metrics = StepMetrics(
        step=step,
        time=time.time(),
        loss=vote.loss if math.isfinite(vote.loss) else None,
        generation=prepared.generation,
        world_size=prepared.layout.world_size,
        samples=step * global_batch,
        step_s=prepared.step_s,
        applied=vote.is_finite,
        user={k: v if math.isfinite(v) else None for k, v in vote.user.items()},
        learning_rate=prepared.taken_with.learning_rate,
        gradient_norm=gradient_norm(vote, prepared.taken_with.loss_scale),
    )
    samples = SampleRecord(step, (step - 1) * global_batch, global_batch, vote.rows_sha256)
    return StepRecord(metrics, samples, vote.pace.idle_s)


def gradient_norm(vote: Vote, loss_scale: float) -> float | None:
    """Of the means over the step; None if they are not finite."""
    return math.sqrt(vote.squares) / (vote.divisor * loss_scale) if vote.is_finite else None


def vote_in(known: KnownSteps) -> CompletedVote | None:
    return known.vote and CompletedVote(known.vote, base64.b64decode(known.content))
