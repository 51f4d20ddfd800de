"""`Stream`: which window of which epoch holds an element of the stream.

The stream is the windows of epoch 0, of epoch 1, ... one after the other, without end. What a
window gives is planned (from the footers) or becomes known when it is read, once for all.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elastic.data.plan import Plan
from elastic.protocol.errors import BadData


@dataclass(frozen=True, slots=True, order=True)
class WindowKey:
    """A window's name; keys are ordered as the stream is."""

    epoch: int
    window: int


@dataclass(frozen=True, slots=True)
class Span:
    """A window and its elements' positions in the stream."""

    key: WindowKey
    first: int
    count: int


class Stream:
    """Positions of a plan's windows, as far as they are known."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts: dict[WindowKey, int] = {}
        self._epoch_firsts = [0]  # of the epochs that have been reached
        self._firsts: dict[int, list[int]] = {}  # epoch -> first elements of its known windows

    def record(self, key: WindowKey, count: int) -> None:
        """A window has been read; BadData if it gave another number of elements before."""
        planned = self._count_of(key)
        known = self._counts.setdefault(key, count) if planned is None else planned
        if known != count:
            raise BadData(
                f"epoch {key.epoch}, window {key.window}",
                f"gave {known} rows before and {count} now; a transform must give the same rows "
                "whenever it sees the same unit (draw from numpy, torch or random, seeded here)",
            )

    def find(self, element: int) -> Span | WindowKey:
        """The window that holds an element; or the key of the first window that has to be read to
        know. BadData if an epoch gives nothing.
        """
        if self._plan.source.has_planned_counts:
            epoch = element // self._plan.num_rows
            found = self._in_epoch(epoch, epoch * self._plan.num_rows, element)
            assert found is not None
            return found
        epoch = bisect_right(self._epoch_firsts, element) - 1
        while True:
            found = self._in_epoch(epoch, self._epoch_firsts[epoch], element)
            if found is not None:
                return found
            epoch += 1

    def follow(self, key: WindowKey) -> Iterator[WindowKey]:
        """This window and those after it, without end."""
        epoch, window = key.epoch, key.window
        while True:
            for index in range(window, len(self._plan.windows(epoch))):
                yield WindowKey(epoch, index)
            epoch, window = epoch + 1, 0

    def _in_epoch(self, epoch: int, first: int, element: int) -> Span | WindowKey | None:
        """Of `find`, for an epoch whose first element is known; None if it is past its end."""
        windows = self._plan.windows(epoch)
        firsts = self._firsts.setdefault(epoch, [first])
        while firsts[-1] <= element:
            key = WindowKey(epoch, len(firsts) - 1)
            if key.window == len(windows):
                self._end_epoch(epoch, firsts)
                return None
            count = self._count_of(key)
            if count is None:
                return key
            firsts.append(firsts[-1] + count)
        window = bisect_right(firsts, element) - 1
        return Span(WindowKey(epoch, window), firsts[window], firsts[window + 1] - firsts[window])

    def _count_of(self, key: WindowKey) -> int | None:
        if self._plan.source.has_planned_counts:
            return sum(unit.num_rows for unit in self._plan.windows(key.epoch)[key.window])
        return self._counts.get(key)

    def _end_epoch(self, epoch: int, firsts: list[int]) -> None:
        if firsts[-1] == firsts[0]:
            raise BadData(
                f"epoch {epoch}", "no row is left: transforms dropped all, or every file is bad"
            )
        if len(self._epoch_firsts) == epoch + 1:
            self._epoch_firsts.append(firsts[-1])

    def counts(self) -> Mapping[WindowKey, int]:
        """What has been recorded."""
        return self._counts
