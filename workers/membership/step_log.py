"""What a worker knows of committed steps until the controller has them on record.

Every rank keeps it, the lowest reports it: should that one be lost, its successor says it again.
Who copies a state is told this with it, for it may be the last one that holds the step.
"""

import base64
import math
import time
from collections import deque
from typing import Any

import numpy as np

from elastic.protocol.messages.to_controller import Committed
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
        self._unrecorded: deque[dict[str, Any]] = deque()
        self.last_vote: CompletedVote | None = None
        """Should we all be lost before others saw it complete, they can still apply the step."""
        self._waited_s = 0.0
        """In the step that was added last."""

    def add(self, step: int, prepared: Prepared, vector: np.ndarray, vote: Vote) -> None:
        """The step that is committed with this vote; `tell` reports it."""
        self.last_vote = CompletedVote.of(step, prepared.layout, vector)
        self._waited_s = vote.pace.waited_s
        batch = self._global_batch
        self._unrecorded.append(
            {
                "metrics": {
                    "step": step,
                    "time": time.time(),
                    "loss": vote.loss if math.isfinite(vote.loss) else None,
                    "generation": prepared.generation,
                    "world_size": prepared.layout.world_size,
                    "samples": step * batch,
                    "step_s": prepared.step_s,
                    "applied": vote.is_finite,
                    "user": {k: v if math.isfinite(v) else None for k, v in vote.user.items()},
                },
                "idle_s": vote.pace.idle_s,
                "samples": {
                    "step": step,
                    "first": (step - 1) * batch,
                    "count": batch,
                    "sha256": vote.rows_sha256,
                },
            }
        )
        self._drop_recorded()

    def complete(self, step: int, step_s: float, *, is_staged: bool = False) -> None:
        """How long the step took that was added last, now that it is over. is_staged: the model is,
        and stages wait for their neighbours."""
        if self._unrecorded and step_of(last := self._unrecorded[-1]) == step:
            last["metrics"]["step_s"] = step_s
            if is_staged:
                last["metrics"]["bubble"] = round(min(self._waited_s / step_s, 1.0), 4)

    def _drop_recorded(self) -> None:
        while self._unrecorded and step_of(self._unrecorded[0]) <= self._link.recorded_step:
            self._unrecorded.popleft()

    def to_frame(self, *, is_newest_enough: bool = False) -> dict[str, Any]:
        """JSON for who copies the state of the last step here; `take` is its other end.

        is_newest_enough: it has been told the steps before."""
        vote, steps = self.last_vote, list(self._unrecorded)
        said = vote and [vote.to_json(), base64.b64encode(vote.content).decode()]
        return {"steps": steps[-1:] if is_newest_enough else steps, "vote": said}

    def take(self, frame: dict[str, Any]) -> None:
        """What the source of a copied state knows."""
        self._unrecorded += frame["steps"]
        self._drop_recorded()
        self.last_vote = vote_in(frame)

    def share(self, group: AnyGroup) -> None:
        """All learn what the lowest rank knows. A collective. Raises PeerLost."""
        mine = self.to_frame() if group.rank() == 0 else None
        self.learn(gather_json(group, mine)[0])

    def learn(self, frame: dict[str, Any]) -> None:
        """What the lowest rank knows: a newcomer may be the last one who can report those steps.
        Of a step that both know, its line counts: the state is the one that it could report."""
        known = {step_of(r): r for r in (*self._unrecorded, *frame["steps"])}
        self._unrecorded = deque(known[step] for step in sorted(known))
        self._drop_recorded()
        if self.last_vote is None:
            self.last_vote = vote_in(frame)

    def tell(self, seat: Seat) -> None:
        """Say what was committed last, as a member that has joined."""
        if self._unrecorded:
            self._say(seat, [self._unrecorded[-1]])

    def repeat(self, seat: Seat, recorded_step: int) -> None:
        """Say again what a lost lowest rank may not have said."""
        unknown = [r for r in self._unrecorded if step_of(r) > recorded_step]
        if unknown:
            self._say(seat, unknown)

    @property
    def known_step(self) -> int:
        """Up to which this worker could report every step that is not on record."""
        return self.known_from(self._link.recorded_step)

    def known_from(self, recorded_step: int) -> int:
        """... if the record ends there."""
        known = recorded_step
        for record in self._unrecorded:
            if step_of(record) == known + 1:
                known += 1
        return known

    def vote_of(self, step: int) -> tuple[dict[str, Any] | None, bytes]:
        """Its layout and content; None if this worker does not know it (any more)."""
        vote = self.last_vote
        if vote is None or vote.step != step:
            return None, b""
        return vote.to_json(), vote.content

    def go_back(self, step: int) -> None:
        """What came after `step` will be done again."""
        while self._unrecorded and step_of(self._unrecorded[-1]) > step:
            self._unrecorded.pop()
        if self.last_vote is not None and self.last_vote.step > step:
            self.last_vote = None

    def forget(self) -> None:
        """Another worker's state was taken over."""
        self._unrecorded.clear()
        self.last_vote = None

    def _say(self, seat: Seat, steps: list[dict[str, Any]]) -> None:
        layout, content = self.vote_of(step_of(steps[-1]))
        world_size = seat.world_size if self._is_delayed else 0
        self._link.send(Committed(seat.generation, world_size, tuple(steps), layout, content))


def vote_in(frame: dict[str, Any]) -> CompletedVote | None:
    said, content = frame["vote"] or (None, "")
    return said and CompletedVote.from_json(said, base64.b64decode(content))


def step_of(record: dict[str, Any]) -> int:
    return int(record["metrics"]["step"])
