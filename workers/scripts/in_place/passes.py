"""The passes of one member over what it trains on, one after the other: `Dealer` and `Pass`.

Here is what they have in common, wherever the samples come from: how far the script is, and what of
that has counted. A DataLoader's are loader.py's, a shard's of Ray Data are shards.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from workers.scripts.in_place.call_state import InPass
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.dealing import Loss


@dataclass(slots=True)
class Use:
    """Of a pass: what for."""

    is_training: bool = True
    is_measured: bool = False
    """It is drawn with gradients, and its batches have forwards without them only."""
    num_measured: int = 0
    """So many iterations are not trained on, although others are."""
    delivered_at: int = -1
    """With the newest batch the script has had so many, of all loaders."""


class Pass:
    """One pass over the samples, on one member: where it stands."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.drawn = self.delivered = self.forwarded = self.counted = -1
        """The last iterations that have come so far; -1: none."""
        self._use = Use()
        self.has_ended = False

    def lose(self, loss: Loss) -> None:
        """What is left is dealt again."""
        raise NotImplementedError

    def _num_used(self, iteration: int, members: Sequence[int]) -> int:
        """The samples that these have in an iteration that has not counted before."""
        raise NotImplementedError

    @property
    def is_training(self) -> bool:
        return self._use.is_training

    @property
    def is_measured(self) -> bool:
        return self._use.is_measured

    def ask(self) -> None:
        """The script waits for the next batch."""
        if torch.is_grad_enabled():
            self._course.applied.begin()

    def _draw(self, iteration: int) -> bool:
        """Gives whether to train."""
        has_gradients = torch.is_grad_enabled()
        self.drawn = iteration
        self._use.is_training = has_gradients and not self.is_measured
        return has_gradients

    def _give(self, num: int, usual: float) -> None:
        """The script has a batch to train on, of so many samples. usual: without a loss."""
        self._course.add_samples(num, usual)
        self._use.delivered_at = self._course.training.num_batches

    def measure(self) -> None:
        """The newest batch of the script's has had a forward without gradients; is it of here?"""
        if self.is_training and self._has_newest:
            self._use.is_training, self._use.is_measured = False, True

    def take_back(self) -> bool:
        """The newest batch of the script's is trained on; is it of here?"""
        if not self.is_measured or not self._has_newest:
            return False
        self._use.is_training, self._use.is_measured = True, False
        self._use.num_measured = self.delivered
        return True

    @property
    def _has_newest(self) -> bool:
        return self._use.delivered_at == self._course.training.num_batches

    def count(self, until: int, members: Sequence[int]) -> int:
        """All iterations up to this one have counted. Gives the samples that these members have
        used in them for training."""
        new = range(max(self.counted + 1, self._use.num_measured), until + 1)
        used = sum(self._num_used(i, members) for i in new) if self.is_training else 0
        self.counted = max(self.counted, until)
        return used


P = TypeVar("P", bound=Pass)


class Dealer(Generic[P]):
    """The passes over one set of samples."""

    def __init__(self, course: Course, number: int) -> None:
        """number: of the set, the same on all members and no other set's."""
        self._course, self.number = course, number
        self._num_passes = 0
        self._has_trained = False
        self._pass: P | None = None

    def _begin(self) -> list[Loss]:
        """The next pass begins. Gives the losses that others have met in it already."""
        self._num_passes += 1
        losses = self._course.losses.get(self.number, [])
        return [loss for number, loss in losses if number == self._num_passes]

    def stand(self) -> InPass:
        if self._pass is None:
            return InPass(self.number, 0, -1, -1)
        return InPass(self.number, self._num_passes, self._pass.drawn, self._pass.counted)

    def lose(self, index: int, number: int, loss: Loss) -> None:
        if self._pass is not None and (index, number) == (self.number, self._num_passes):
            self._pass.lose(loss)

    @property
    def is_measured(self) -> bool:
        return self._pass is not None and self._pass.is_measured

    def begin_forward(self) -> bool:
        """What comes to the script from now on is not of this forward. Whether it may be of what
        has come."""
        of = self._pass
        if of is None:
            return False
        is_new = of.is_training and of.delivered > of.forwarded
        of.forwarded = of.delivered
        self._has_trained |= is_new
        return is_new

    def measure(self) -> None:
        """A forward without gradients has begun. A loader that has trained is one to train."""
        if self._pass is not None and not self._has_trained:
            self._pass.measure()

    def take_back(self) -> None:
        """A forward with gradients has begun, and none has a batch that was not measured."""
        if self._pass is not None:
            self._has_trained |= self._pass.take_back()

    def count(self, *, is_training: bool, members: Sequence[int]) -> int:
        """is_training: a unit has ended; else a collective outside of training. Gives how many
        samples of these members have come to count in training."""
        of = self._pass
        if of is None:
            return 0
        if is_training:
            return of.count(of.forwarded, members)
        if not of.is_training:
            of.count(of.delivered, members)
        return 0
