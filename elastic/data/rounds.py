"""How a pass over a data set is dealt to ranks: in rounds, of which each rank has a batch.

The rows of a round are the same for every number of ranks that share it alike, so a pass may go on
at a row with other ranks than before. Numbers of rows only; the rows themselves are passes.py's.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from elastic.data.permutation import permutation
from elastic.protocol.errors import WrongInput

EndsBefore: TypeAlias = Callable[[int], int | None]
"""Of a row: the number of rows of the pass, if it has not that row and those before it."""
Round: TypeAlias = tuple[int, int]
"""Its first row, and the row behind its last."""


class TooFewRows(WrongInput, ValueError):
    """What is left of a pass cannot be dealt: some ranks would have no batch."""


def rounds(
    first: int,
    ranks: int,
    drop_last: bool,
    next_end: Callable[[int], int],
    ends_before: EndsBefore,
) -> Iterator[Round]:
    """From a row to the end of a pass; every rank has a row in each round.

    next_end: of a row, the row behind the round that begins there; what it gives may lie behind the
        pass. The last round is shorter, or longer by less than a row for each rank: what would be a
        round that has nothing for some ranks belongs to the one before. With drop_last such rows,
        and a round that is not whole, are left out.
    Raises TooFewRows.
    """
    while True:
        stop = next_end(first)
        end = ends_before(stop + ranks)
        if end is None:
            yield first, stop
            first = stop
            continue
        if end == first:
            return
        if end - first < ranks:
            if drop_last:
                return
            raise TooFewRows(f"{end - first} of {end} rows are left for {ranks} ranks to share")
        if not drop_last:
            yield first, end
        elif end >= stop:
            yield first, stop
        return


class LocalShuffle:
    """Which row is at a position of a pass that is shuffled in windows; by seed, pass and position
    alone."""

    def __init__(self, window: int, seed: int, number: int, ends_before: EndsBefore) -> None:
        """window: rows that are shuffled together. number: of the pass."""
        self._window, self._key, self._ends_before = window, (seed, number), ends_before
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, positions: range) -> np.ndarray:
        """At these positions, which are there."""
        first, last = (p // self._window for p in (positions[0], positions[-1]))
        self._orders = {w: order for w, order in self._orders.items() if w >= first}
        found = [self._order(window) for window in range(first, last + 1)]
        return np.concatenate(found)[np.asarray(positions) - first * self._window]

    def oldest(self, position: int) -> int:
        """No row before this one is at this position or at a later one."""
        return position // self._window * self._window

    def _order(self, window: int) -> np.ndarray:
        if window not in self._orders:
            first = window * self._window
            end = self._ends_before(first + self._window)
            size = self._window if end is None else end - first
            self._orders[window] = first + permutation(size, "rows", *self._key, window)
        return self._orders[window]
