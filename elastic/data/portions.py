"""Who uses which positions of a pass in each of its iterations, also after readers were lost.

An iteration has a round (rounds.py) of as many ranks as the script was called with, however many
share it. What the lost had of iterations that have not counted belongs to the next ones. Pure: all
who are left come to the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, takewhile
from typing import TypeAlias

from elastic.data.rounds import EndsBefore, rounds

MAX_GROWTH = 2
"""Times as large as the script's own may a batch become when the rest of a pass is dealt again."""
ANY = 1 << 62
KEPT = 16
"""Portions that have not counted, whose rows are kept for who has them next."""
UNUSED = "%d rows of a lost rank are used in no iteration of their pass"
"""For the log: too few for each rank to have one, at the end of it."""
Spans: TypeAlias = tuple[range, ...]
"""Positions, in order."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Members were lost in a pass."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    furthest: int
    """The last iteration that any survivor has drawn; -1: none."""
    counted: int
    """The last iteration whose samples have counted on all members of before; -1: none."""


@dataclass(frozen=True, slots=True)
class Portion:
    """An iteration of a pass, on all who share it."""

    iteration: int
    """-1: what is before the first one."""
    spans: Spans
    """None: the pass has no such iteration."""
    readers: tuple[int, ...]
    """In the order in which they share it."""
    stop: int
    """The position behind its round."""
    missing: Spans = ()
    """Positions before that which are dealt later; or never, where the pass is over."""

    def weight(self, reader: int) -> float:
        """What a reader's share counts, by positions: 1 if all have as many."""
        num = length(self.spans)
        return length(self.share(reader)) * len(self.readers) / num if num else 0.0

    def share(self, reader: int) -> Spans:
        """As many positions as any other reader has, or one more."""
        index, num, size = self.readers.index(reader), len(self.readers), length(self.spans)
        return cut(self.spans, size * index // num, size * (index + 1) // num)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What is known of a pass where the rest of it begins."""

    last: Portion
    """The rest is what follows it."""
    uncounted: Mapping[int, Portion]
    """The last one and those before it, unless they have counted on all readers, the lost too."""
    losses: Sequence[Loss] = ()
    """That nothing before the rest has been dealt for."""

    @property
    def missing(self) -> Spans:
        """Positions before the last one's stop that the rest has."""
        found, furthest = list(self.last.missing), -1
        for loss in self.losses:
            furthest = max(furthest, loss.furthest)
            found += given_up(loss, min(furthest, self.last.iteration), self.uncounted)
        return tuple(found)

    @property
    def oldest(self) -> int:
        """No position before this one is in the rest, whoever is lost next."""
        spans = [span for portion in self.uncounted.values() for span in portion.spans]
        return min([self.last.stop, *(span.start for span in (*spans, *self.last.missing))])


def given_up(loss: Loss, until: int, uncounted: Mapping[int, Portion]) -> Spans:
    """What the lost had of the iterations up to this one that have not counted."""
    lost = [reader for reader in loss.before if reader not in loss.after]
    iterations = range(loss.counted + 1, until + 1)
    return tuple(span for i in iterations for reader in lost for span in uncounted[i].share(reader))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How a pass is dealt."""

    ranks: int
    """That the script was called with."""
    batch_size: int | None
    """Rows; None: as `next_end` says."""
    drop_last: bool
    next_end: Callable[[int], int]
    ends_before: EndsBefore
    """Both as `rounds` has them."""

    def rest(self, behind: Behind) -> Iterator[Portion]:
        """Its portions in order, and one without spans at the end. Raises TooFewRows."""
        last: Portion = behind.last
        uncounted, furthest = dict(behind.uncounted), -1
        for loss in behind.losses:
            furthest = max(furthest, loss.furthest)  # who was further may be lost, too
            while last.iteration < furthest:
                last = self._next(last)
                uncounted[last.iteration] = last
                if not last.spans:
                    lost = given_up(loss, last.iteration, uncounted)
                    yield replace(last, missing=(*last.missing, *lost))
                    return
                yield last
            missing = (*last.missing, *given_up(loss, furthest, uncounted))
            last = replace(last, readers=loss.after, missing=missing)
        while last.spans or last.iteration < 0:
            last = self._next(last)
            yield last

    def _next(self, last: Portion) -> Portion:
        num_missing, num_readers = length(last.missing), len(last.readers)
        found = self._round(last.stop)
        stop = last.stop if found is None else found[1]
        num_taken = 0
        if num_missing:
            room = self._room(num_readers, stop - last.stop)
            is_last = found is None or self._round(stop) is None
            num_taken = min(room, num_missing)
            if is_last and num_missing - room < num_readers:
                num_taken = num_missing  # there is no iteration of its own for so few
            if found is None and num_missing < num_readers:
                num_taken = 0
        own = () if found is None else (range(*found),)
        return Portion(
            last.iteration + 1,
            (*own, *cut(last.missing, 0, num_taken)),
            last.readers,
            stop,
            cut(last.missing, num_taken, num_missing),
        )

    def _room(self, num_readers: int, size: int) -> int:
        """For what is missing, in an iteration of a round of this size."""
        if self.batch_size is None:
            return ANY
        return max(MAX_GROWTH * self.batch_size * num_readers - size, num_readers)

    def _round(self, first: int) -> tuple[int, int] | None:
        found = rounds(first, self.ranks, self.drop_last, self.next_end, self.ends_before)
        return next(found, None)


def length(spans: Spans) -> int:
    return sum(map(len, spans))


def cut(spans: Spans, first: int, stop: int) -> Spans:
    """Of the positions in these, those from the one to the other."""
    found: list[range] = []
    at = 0
    for span in spans:
        if part := span[max(first - at, 0) : max(stop - at, 0)]:
            found.append(part)
        at += len(span)
    return tuple(found)


class Standing:
    """How far a reader is in a pass."""

    def __init__(self, last: Portion, losses: Sequence[Loss] = ()) -> None:
        """last: what is before the first portion. losses: those that others have met already."""
        self._last, self._losses = last, list(losses)
        self._uncounted: dict[int, Portion] = {}
        self._counted = -1
        self.needed = min([last.stop, *(span.start for span in last.missing)])
        """What lies before this position is at hand no more: whoever is lost with some of it has it
        read again."""
        self.num_losses = 0
        """Heard of since it began."""
        self.end: Portion | None = None
        """The one without spans, once this reader has come to it."""

    @property
    def behind(self) -> Behind:
        uncounted, losses = dict(self._uncounted), tuple(self._losses)
        return Behind(last=self._last, uncounted=uncounted, losses=losses)

    @property
    def is_over_elsewhere(self) -> bool:
        """Whoever was lost had an iteration that another reader has not, who is beyond the pass."""
        assert self.end is not None
        return max((loss.furthest for loss in self._losses), default=-1) >= self.end.iteration

    @property
    def at(self) -> tuple[int, Spans]:
        """The position behind the newest round, and those before it that are missing."""
        behind = Behind(last=self._last, uncounted=self._uncounted, losses=self._losses)
        return self._last.stop, behind.missing

    def portion(self, iteration: int) -> Portion:
        """One that has not counted."""
        return self._uncounted[iteration]

    def deliver(self, portion: Portion) -> None:
        self._last = self._uncounted[portion.iteration] = portion
        furthest = accumulate((loss.furthest for loss in self._losses), max)
        self._losses = [
            loss for loss, at in zip(self._losses, furthest, strict=True) if at >= portion.iteration
        ]
        self._forget()

    def count(self, until: int) -> None:
        """All iterations up to this one have counted, on all readers that are left."""
        self._counted = until
        self._forget()

    def _forget(self) -> None:
        until = min([self._counted, *(loss.counted for loss in self._losses)])
        for iteration in [*takewhile(lambda i: i <= until, self._uncounted)]:
            del self._uncounted[iteration]
        newest = islice(reversed(self._uncounted.values()), KEPT)
        spans = [span for portion in newest for span in portion.spans]
        starts = [span.start for span in (*spans, *self._last.missing)]
        self.needed = min([self._last.stop, *starts])

    def lose(self, loss: Loss) -> None:
        self._losses.append(loss)
        self.num_losses += 1
