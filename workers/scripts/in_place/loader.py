"""A script's loaders in a call that goes on through losses: what they load is dealt (dealing.py).

A DataLoader whose sampler is torch's DistributedSampler gives that sampler's batches until a member
is lost; then what nobody has drawn is dealt again, and batches that loader processes have made of
the old share are dropped. Any other loader of training data refuses: nobody knows whose its samples
are.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from workers.scripts.in_place.course import Course
from workers.scripts.in_place.dealing import Loss, Plan, Shape, dealt_again, plan_of
from workers.scripts.in_place.standing import InPass

log = logging.getLogger(__name__)
Iterate = Callable[[Any], Iterator[Any]]


def is_dealt(loader: Any, course: Course) -> bool:
    """Whether its samples can be dealt: they are those of torch's own sampler and batches, shared
    among the ranks of the call."""
    return (
        type(loader.sampler) is DistributedSampler
        and (loader.sampler.num_replicas, loader.sampler.rank) in course.seats
        and type(loader.batch_sampler) is BatchSampler
        and loader.batch_sampler.sampler is loader.sampler
        and getattr(loader, "in_order", True)
    )


class Dealer:
    """Of one loader of the script's: its passes, one after the other."""

    def __init__(self, course: Course, loader: Any) -> None:
        self._course, self.loader = course, loader
        self._index = len(course.loaders)
        course.loaders.append(self)
        self._number = 0
        self._pass: Pass | None = None

    def begin(self) -> "Pass":
        """The next pass."""
        carried: list[int] = []
        if self._pass is not None:
            carried = self._pass.left_over()
        self._number += 1
        losses = [
            loss
            for number, loss in self._course.losses.get(self._index, [])
            if number == self._number
        ]
        self._pass = Pass(self._course, self.loader, carried, losses)
        return self._pass

    def stand(self) -> InPass:
        if self._pass is None:
            return InPass(0, -1, -1)
        return InPass(self._number, self._pass.drawn, self._pass.counted)

    def lose(self, number: int, loss: Loss) -> None:
        if self._pass is not None and number == self._number:
            self._pass.lose(loss)

    def begin_forward(self) -> None:
        """What comes to the script from now on is not of this forward."""
        if self._pass is not None:
            self._pass.forwarded = self._pass.delivered

    def count(self, *, is_training: bool) -> None:
        """is_training: a unit has ended; else a collective outside of training."""
        if self._pass is None:
            return
        if is_training:
            self._pass.counted = self._pass.forwarded
        elif not self._pass.is_training:
            self._pass.counted = self._pass.delivered

    def num_left_over(self) -> int:
        return 0 if self._pass is None else len(self._pass.left_over())


class Pass:
    """One pass over the data, on one member: an iterator like DataLoader's own."""

    def __init__(
        self, course: Course, loader: Any, carried: Sequence[int], losses: Sequence[Loss]
    ) -> None:
        """carried: samples of the pass before. losses: those that others have met in this pass."""
        self._course, self._loader = course, loader
        sampler = loader.sampler
        self._samples = [*order_of(sampler), *carried]
        shape = Shape(
            num_positions=sampler.total_size,
            replicas=sampler.num_replicas,
            batch_size=loader.batch_sampler.batch_size,
            drop_last=loader.batch_sampler.drop_last,
            num_carried=len(carried),
        )
        members = losses[0].before if losses else course.members
        self._plan: Plan = plan_of(shape, members, losses)
        self._next = 0
        """The iteration that is loaded next."""
        self._loading: deque[int | None] = deque()
        """Iterations that are being loaded, in order; None: of a share that was dealt again."""
        self._held: deque[tuple[int, bool]] = deque()
        """Drawn by a loader around this one, which has not delivered them; and whether to train."""
        self.drawn = self.delivered = self.forwarded = self.counted = -1
        self.is_training = True
        self.holds_back = False
        """A loader around this one says what it delivers."""
        self._batches: Iterator[Any] = iter(())

    def open(self, iterate: Iterate) -> None:
        """iterate: DataLoader's own."""
        self._batches = iterate(self._loader)

    def __iter__(self) -> "Pass":
        return self

    def __len__(self) -> int:
        return self._plan.iterations

    def __next__(self) -> Any:
        self._course.check()
        while True:
            batch = next(self._batches)
            iteration = self._loading.popleft()
            if iteration is not None:
                break
        self.drawn, self.is_training = iteration, torch.is_grad_enabled()
        self._held.append((iteration, self.is_training))
        if not self.holds_back:
            self.deliver()
        return batch

    def deliver(self) -> None:
        """The script has the next batch that was drawn."""
        if self._held:
            self.delivered, is_training = self._held.popleft()
            size = len(self._plan.share(self.delivered, self._course.member))
            if is_training:
                self._course.add_samples(size / self._plan.shape.batch_size)

    def indices(self) -> Iterator[list[int]]:
        """Of the dataset, for what is loaded next."""
        return Indices(self)

    def next_indices(self) -> list[int]:
        if self._next >= self._plan.iterations:
            raise StopIteration
        share = self._plan.share(self._next, self._course.member)
        self._loading.append(self._next)
        self._next += 1
        return [self._samples[position] for position in share]

    def lose(self, loss: Loss) -> None:
        self._plan = dealt_again(self._plan, loss)
        first = self._plan.stretches[-1].first
        self._loading = deque(i if i is not None and i < first else None for i in self._loading)
        self._next = min(self._next, first)

    def left_over(self) -> list[int]:
        """Samples for which there was no place. Of a pass that trains nothing, none: whatever was
        measured over its samples is less one share then."""
        found = [self._samples[position] for position in self._plan.left_over]
        if found and not self.is_training:
            log.warning(
                "a pass without gradients goes without %d samples of a lost rank", len(found)
            )
            return []
        return found


class Indices:
    """May have more to give after it had none: what is left is dealt again."""

    def __init__(self, of: Pass) -> None:
        self._of = of

    def __iter__(self) -> "Indices":
        return self

    def __next__(self) -> list[int]:
        return self._of.next_indices()


def order_of(sampler: Any) -> list[int]:
    """The samples of all replicas, padding included: replica r has r, r + replicas and so on."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.num_samples = 1, 0, sampler.total_size
    return list(iter(whole))


class Loaders:
    """Of one call: which of its loaders are dealt."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._dealers: dict[int, Dealer] = {}
        self._opening: Pass | None = None
        self._holds_back = False

    def iterate(self, loader: DataLoader[Any], rays_own: Iterate) -> Iterator[Any]:
        """What `iter(loader)` gives. rays_own: DataLoader's `__iter__`."""
        self._course.check()
        if not is_dealt(loader, self._course):
            if torch.is_grad_enabled():
                self._course.suspect("a DataLoader has no DistributedSampler of torch's")
            return rays_own(loader)
        if id(loader) not in self._dealers:
            self._dealers[id(loader)] = Dealer(self._course, loader)
        opened = self._dealers[id(loader)].begin()
        opened.holds_back, self._opening = self._holds_back, opened
        try:
            opened.open(rays_own)
        finally:
            self._opening = None
        return opened

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Whatever is opened within is drawn ahead by a loader around it, which says when the
        script has a batch."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def indices_of(self, batch_sampler: Any) -> Iterator[list[int]] | None:
        """What it gives to the loader that is being opened; None: what it gives anyway."""
        opened = self._opening
        if opened is None or opened._loader.batch_sampler is not batch_sampler:
            return None
        return opened.indices()

    def end(self) -> None:
        """The script has returned: what a loader would have dealt in another pass is told."""
        if left := sum(dealer.num_left_over() for dealer in self._dealers.values()):
            log.warning("%d samples of lost ranks were used in no pass: none followed", left)


def deliver(batches: Any) -> None:
    """The script has the next batch of what a loader around it has drawn from."""
    if isinstance(batches, Pass):
        batches.deliver()
