"""Shards of Ray Data in a call that goes on through losses: where their passes are, as for loaders.

How a pass is dealt, and dealt again, is elastic/data/portions.py's; who reads its rows is
elastic/on_ray/feed/shard.py's.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from elastic.data.portions import UNUSED, Portion, Spans, Standing, length
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.dealing import Loss
from workers.scripts.in_place.passes import Dealer, Pass
from workers.scripts.in_place.rule import NOT_BATCHES

log = logging.getLogger(__name__)

FEW = (
    "a rank was lost at the end of a pass with {} rows, too few for each of those left to have one"
)
TWO = "a rank is lost while two passes over one data set are under way"


class ShardDealer(Dealer["ShardPass"]):
    """Of one shard that all ranks share."""

    def __init__(
        self,
        course: Course,
        number: int,
        tell: Callable[[tuple[int, ...]], None],
        call_again: Callable[[str], NoReturn],
    ) -> None:
        """number: no loader's, and the same on all ranks. tell: the data sets' server who is left.
        call_again: the script, as it cannot go on in place from here."""
        super().__init__(course, number)
        self._tell, self.call_again = tell, call_again

    @property
    def readers(self) -> tuple[int, ...]:
        """Who is left, in the order of today's ranks."""
        return self._course.members

    def begin_shared(self, row: int, missing: Spans, batch_size: int) -> "ShardPass":
        """The next pass, from its row on."""
        losses = self._begin()
        members = losses[0].before if losses else self._course.members
        last = Portion(-1, (), members, row, missing)
        self._pass = begun = ShardPass(self, self._course, last, batch_size, losses)
        return begun

    def lose(self, index: int, number: int, loss: Loss) -> None:
        super().lose(index, number, loss)
        if index == self.number:
            self._tell(loss.after)

    def refuse_unbatched(self) -> None:
        """A pass that is not dealt again: the next loss has the script called again, as it is now
        if a rank is lost already."""
        self._course.refuse(NOT_BATCHES.why)
        if self._course.operations.num_losses:
            self._course.deny(f"{NOT_BATCHES.why}, and a rank is lost")

    def is_newest(self, of: "ShardPass") -> bool:
        return self._pass is of


class ShardPass(Pass):
    """One pass over it, on one member."""

    def __init__(
        self,
        dealer: ShardDealer,
        course: Course,
        last: Portion,
        batch_size: int,
        losses: Sequence[Loss],
    ) -> None:
        """last: what is before the first portion. losses: those that others have met in this
        pass."""
        super().__init__(course)
        self._dealer, self._batch_size = dealer, batch_size
        self._num_losses = course.operations.num_losses
        self.standing = Standing(last, losses)
        self._has_losses = bool(losses)

    def deliver_share(self, portion: Portion) -> None:
        """The script is given its share."""
        is_told = self._dealer.is_newest(self)
        if self._course.operations.num_losses != self._num_losses and not is_told:
            self._dealer.call_again(TWO)
        self.standing.deliver(portion)
        self.delivered = portion.iteration
        if self._draw(portion.iteration):
            usual = length(portion.spans) / len(portion.readers) or self._batch_size
            self._give(length(portion.share(self._course.member)), usual)

    def end(self, portion: Portion) -> None:
        """The script has had all. StepCancelled if rows of a rank that was lost in this pass have
        no place left. Those that a restored state lacks go without: a call again would restore
        it again."""
        self.standing.end, self.drawn, self.has_ended = portion, portion.iteration, True
        if not (num_rows := length(portion.missing)):
            return
        if self.is_training and self._has_losses and not self.standing.is_over_elsewhere:
            self._dealer.call_again(FEW.format(num_rows))
        log.warning(UNUSED, num_rows)

    def count(self, until: int, members: Sequence[int]) -> int:
        used = super().count(until, members)
        self.standing.count(self.counted)
        return used

    def _num_used(self, iteration: int, members: Sequence[int]) -> int:
        portion = self.standing.portion(iteration)
        return sum(length(portion.share(r)) for r in portion.readers if r in members)

    def lose(self, loss: Loss) -> None:
        self._has_losses = True
        self.standing.lose(loss)
