"""A script's loaders in a call that goes on through losses: what they load is dealt (dealing.py).

A DataLoader whose sampler is known (sampled.py) gives that sampler's batches until a member is
lost; then what nobody has drawn is dealt again, and batches that loader processes have made of the
old share are dropped. Any other loader of training data refuses: nobody knows whose its samples
are.
"""

import hashlib
import inspect
import logging
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from workers.scripts.in_place import rule
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.dealing import Loss, Plan, Shape, dealt_again, plan_of
from workers.scripts.in_place.passes import Dealer, Pass
from workers.scripts.in_place.sampled import is_shard, is_shared, sampled
from workers.scripts.ranks import module_of
from workers.torch_private.loading import hand_batches

log = logging.getLogger(__name__)
Iterate = Callable[[Any], Iterator[Any]]
OWN, ACCELERATE = ("torch.", "workers.", "elastic."), "accelerate."
"""By the names of their modules."""
REMEMBERED = 4
"""Loaders of the script's that are gone: what they have left over may still be used."""


class LoaderDealer(Dealer["LoaderPass"]):
    """Of one loader of the script's. It holds neither the loader nor what that has loaded, which
    the script may be done with."""

    def __init__(self, course: Course, number: int, loader: Any) -> None:
        """number: of the loader, in the order in which the script has begun them."""
        super().__init__(course, number)
        self._loader, self._dataset = weakref.ref(loader), reference(loader.dataset)

    @property
    def is_gone(self) -> bool:
        """The script has no such loader any more; ranks may find it at different times."""
        return self._loader() is None

    def is_over(self, dataset: Any) -> bool:
        """It has come to the end of a pass over these data."""
        has_ended = self._pass is not None and self._pass.has_ended
        return has_ended and self._dataset() is dataset

    def begin(self, loader: Any, carried: Sequence[int]) -> "LoaderPass":
        """The next pass. carried: samples that other loaders of these data have left over."""
        carried = [*self.take_left_over(), *carried]
        losses = self._begin()
        self._pass = begun = LoaderPass(self._course, loader, carried, losses)
        return begun

    def take_left_over(self) -> list[int]:
        """Of the newest pass; it has no more then."""
        return [] if self._pass is None else self._pass.take_left_over()


def is_opened_by_accelerate() -> bool:
    """The loader that is being opened is one that Accelerate's draws from."""
    frame = inspect.currentframe()
    while frame is not None and module_of(frame).startswith(OWN):
        frame = frame.f_back
    return frame is not None and module_of(frame).startswith(ACCELERATE)


def reference(dataset: Any) -> Callable[[], Any]:
    """Of what cannot be referred to weakly, a list for one, nothing is known later."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: None


class Order:
    """The samples of a pass, and how they are dealt when it begins. They are drawn when the first
    one is asked for, as the script's own sampler does it: a loader that is opened may draw from
    the same generator first."""

    def __init__(
        self,
        batch_sampler: Any,
        carried: Sequence[int],
        members: tuple[int, ...],
        losses: Sequence[Loss],
    ) -> None:
        self._batch_sampler, self._carried = batch_sampler, carried
        self._members, self._losses = members, losses
        self._num_asked = 0
        """Iterations, and then the end."""

    @cached_property
    def _drawn(self) -> "tuple[array[int], Shape]":
        samples, shape = sampled(self._batch_sampler, len(self._carried))
        self._batch_sampler = None
        return array("q", (*samples, *self._carried)), shape

    @property
    def samples(self) -> "array[int]":
        """By their positions."""
        return self._drawn[0]

    @cached_property
    def begun(self) -> Plan:
        return plan_of(self._drawn[1], self._members, self._losses)

    def keep_up(self, iteration: int, own: Iterator[Any]) -> None:
        """own: of the script's batch sampler, which draws from the script's generator whenever it
        would without us."""
        if iteration == self._num_asked:
            self._num_asked += 1
            next(own, None)


class LoaderPass(Pass):
    """One pass of a loader's, on one member: what is drawn, and whose it is."""

    def __init__(
        self, course: Course, loader: Any, carried: Sequence[int], losses: Sequence[Loss]
    ) -> None:
        """carried: samples of the pass before. losses: those that others have met in this pass."""
        super().__init__(course)
        members = losses[0].before if losses else course.members
        self._order = Order(loader.batch_sampler, carried, members, losses)
        self._num_taken = 0
        """Of what is left over, so many are of other passes now."""
        self._next = 0
        """The iteration that is loaded next."""
        self._loading: deque[int | None] = deque()
        """Iterations that are being loaded, in order; None: of a share that was dealt again."""
        self._held: deque[tuple[int, bool]] = deque()
        """Drawn by a loader around this one, which has not delivered them; and whether to train."""
        self.holds_back = False
        """A loader around this one says what it delivers."""
        self.draws_ahead = False
        """A loader around this one draws a batch before it delivers the one before."""

    @cached_property
    def _plan(self) -> Plan:
        return self._order.begun

    @property
    def iterations(self) -> int:
        return self._plan.iterations

    def digest(self) -> str:
        """Of its samples in their order."""
        return hashlib.sha256(self._order.samples.tobytes()).hexdigest()

    def draw(self, batches: Iterator[Any]) -> Any:
        """The next batch of these that is not of a share that was dealt again."""
        self._course.check()
        self.ask()
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                self.has_ended = True
                if self.draws_ahead:
                    self.deliver()
                raise
            self._course.waited_for_data(time.monotonic() - began)
            iteration = self._loading.popleft()
            if iteration is not None:
                break
        self._held.append((iteration, self._draw(iteration)))
        if len(self._held) > 1 if self.draws_ahead else not self.holds_back:
            self.deliver()
        return batch

    def deliver(self) -> None:
        """The script has the next batch that was drawn."""
        if self._held:
            self.delivered, is_training = self._held.popleft()
            size = len(self._plan.share(self.delivered, self._course.member))
            if is_training:
                self._give(size, self._plan.usual(self.delivered))

    def _num_used(self, iteration: int, members: Sequence[int]) -> int:
        return self._plan.num_used(iteration, members)

    def next_indices(self, own: Iterator[Any]) -> list[int]:
        """Of the dataset, for what is loaded next. own: see `Order.keep_up`."""
        samples = self._order.samples
        self._order.keep_up(self._next, own)
        if self._next >= self._plan.iterations:
            raise StopIteration
        share = self._plan.share(self._next, self._course.member)
        self._loading.append(self._next)
        self._next += 1
        return [samples[position] for position in share]

    def lose(self, loss: Loss) -> None:
        self._plan = dealt_again(self._plan, loss)
        first = self._plan.stretches[-1].first
        self._loading = deque(i if i is not None and i < first else None for i in self._loading)
        self._next = min(self._next, first)

    def take_left_over(self) -> list[int]:
        """Samples for which there was no place, once. Of a pass that trains nothing, none: whatever
        was measured over its samples is less one share then."""
        left = self._plan.left_over[self._num_taken :]
        self._num_taken = len(self._plan.left_over)
        if left and not self.is_training:
            log.warning(
                "a pass without gradients goes without %d samples of a lost rank", len(left)
            )
            return []
        return [self._order.samples[position] for position in left]


class Batches:
    """Of one pass: an iterator like DataLoader's own. What is loaded goes with it."""

    def __init__(self, of: LoaderPass, batches: Iterator[Any]) -> None:
        """batches: DataLoader's own."""
        self._of, self._batches = of, batches

    def __iter__(self) -> "Batches":
        return self

    def __len__(self) -> int:
        return self._of.iterations

    def __next__(self) -> Any:
        return self._of.draw(self._batches)

    def deliver(self) -> None:
        self._of.deliver()


class Indices:
    """May have more to give after it had none: what is left is dealt again."""

    def __init__(self, of: LoaderPass, own: Iterator[Any]) -> None:
        """own: see `Order.keep_up`."""
        self._of, self._own = of, own

    def __iter__(self) -> "Indices":
        return self

    def __next__(self) -> list[int]:
        return self._of.next_indices(self._own)


class Loaders:
    """Of one call: which of its loaders are dealt."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._dealers: weakref.WeakKeyDictionary[Any, LoaderDealer] = weakref.WeakKeyDictionary()
        self._newest: list[LoaderDealer] = []
        """The loaders that were begun last, of which some may be gone."""
        self._shards: list[Dealer[Any]] = []
        self._num_begun = 0
        self._opening: tuple[Any, LoaderPass] | None = None
        """A loader's batch sampler, and its pass."""
        self._holds_back = False

    def iterate(self, loader: DataLoader[Any], rays_own: Iterate) -> Iterator[Any]:
        """What `iter(loader)` gives. rays_own: DataLoader's `__iter__`."""
        self._course.check()
        if not is_shared(loader, self._course.seats):
            if torch.is_grad_enabled():
                self._course.suspect(rule.NOT_DEALT.why)
            return rays_own(loader)
        opened = self._dealer(loader).begin(loader, self._carried(loader))
        opened.holds_back = self._holds_back
        opened.draws_ahead = is_shard(loader.batch_sampler) and is_opened_by_accelerate()
        self._opening = (loader.batch_sampler, opened)
        try:
            with self._given(loader):
                batches = Batches(opened, rays_own(loader))
        finally:
            self._opening = None
        if is_shard(loader.batch_sampler) and torch.is_grad_enabled():
            self._course.note_order(self._dealer(loader).number, opened.digest())
        return batches

    @contextmanager
    def _given(self, loader: Any) -> Iterator[None]:
        """Within, the loader asks us for its batches, whatever class its batch sampler is of."""
        before = loader.batch_sampler
        if type(before) is not BatchSampler:  # whose own is replaced (seams.py)
            instead = vars(loader)["batch_sampler"] = Instead(before, self)
            hand_batches(loader, instead, Instead)
        try:
            yield
        finally:
            vars(loader)["batch_sampler"] = before

    def _dealer(self, loader: DataLoader[Any]) -> LoaderDealer:
        if (found := self._dealers.get(loader)) is not None:
            return found
        made = self._dealers[loader] = LoaderDealer(self._course, self._num_begun, loader)
        self._num_begun += 1
        if len(self._newest) == REMEMBERED and self._newest[0].is_gone:
            self._tell_unused(self._newest[:1])
        self._newest = [*self._newest, made][-REMEMBERED:]
        self._note()
        return made

    def add(self, shard: Dealer[Any]) -> None:
        """Of Ray Data: it is dealt as loaders are."""
        self._shards.append(shard)
        self._note()

    def _note(self) -> None:
        dealers: set[Dealer[Any]] = {*self._newest, *self._dealers.values(), *self._shards}
        self._course.loaders = sorted(dealers, key=lambda dealer: dealer.number)

    def _carried(self, loader: DataLoader[Any]) -> list[int]:
        """What other loaders of these data have left over, in the same order on all ranks."""
        if not torch.is_grad_enabled():
            return []
        own, dataset = self._dealers[loader], loader.dataset
        others = [d for d in self._newest if d is not own and d.is_over(dataset)]
        return [sample for other in others for sample in other.take_left_over()]

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
        if self._opening is None or self._opening[0] is not batch_sampler:
            return None
        own = iter(batch_sampler) if is_shard(batch_sampler) else iter(())
        return Indices(self._opening[1], own)

    def end(self) -> None:
        """The script has returned: what a loader would have dealt in another pass is told."""
        self._tell_unused({*self._newest, *self._dealers.values()})

    def _tell_unused(self, dealers: Iterable[LoaderDealer]) -> None:
        if not (left := sum(len(dealer.take_left_over()) for dealer in dealers)):
            return
        told = f"{left} samples of lost ranks were used in no pass: none followed"
        log.warning(told)
        if self._course.group.inner.rank() == 0:
            print(f"elastic: {told}", file=sys.stderr, flush=True)


class Instead:
    """Of a batch sampler; DataLoader's iterators may keep it for other passes."""

    def __init__(self, batch_sampler: Any, loaders: Loaders) -> None:
        self._batch_sampler, self._loaders = batch_sampler, loaders

    def __iter__(self) -> Iterator[list[int]]:
        found = self._loaders.indices_of(self._batch_sampler)
        return iter(self._batch_sampler) if found is None else found

    def __len__(self) -> int:
        return len(self._batch_sampler)


def deliver(batches: Any) -> None:
    """The script has the next batch of what a loader around it has drawn from."""
    if isinstance(batches, Batches):
        batches.deliver()
