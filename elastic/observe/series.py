"""Long series in few points: what a chart can show of them, and nothing that it would hide.

What the numbers mean is elsewhere.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy

np: Any = numpy  # its stubs know less than pyright strict wants
Floats: TypeAlias = Any
"""A numpy array of float64, shape (n,); numpy's own types of arrays say less than they cost."""


def thinned(x: Floats, y: Floats, num_bins: int) -> Floats:
    """Positions, ascending, of the points to draw: of each of `num_bins` equal parts of x the
    lowest and the highest y. Points without a finite x and y are left out.

    x, y: shape (n,). At most 2 * num_bins positions.
    """
    positions = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if len(positions) <= 2 * num_bins:
        return positions
    bins = bins_of(x[positions], num_bins)
    order: Floats = np.lexsort((y[positions], bins))
    sorted_bins = bins[order]
    is_first: Floats = np.r_[True, sorted_bins[1:] != sorted_bins[:-1]]
    is_last: Floats = np.r_[is_first[1:], True]
    return positions[np.unique(order[is_first | is_last])]


def bins_of(x: Floats, num_bins: int) -> Floats:
    """Of each finite x the number of its bin, 0 to num_bins - 1, of equal parts of their range."""
    low, high = float(x.min()), float(x.max())
    width = (high - low) / num_bins or 1.0
    return np.clip(((x - low) / width).astype(np.int64), 0, num_bins - 1)


def seconds_in(began: Sequence[float], ended: Sequence[float], edges: Floats) -> Floats:
    """How much of each bin the intervals cover, which are in order and do not overlap.

    edges: shape (n + 1,), ascending. Seconds, shape (n,).
    """
    if not began:
        return np.zeros(len(edges) - 1)
    times: Floats = np.empty(2 * len(began))
    times[0::2], times[1::2] = began, ended
    times = np.maximum.accumulate(times)  # clocks may have gone backwards
    covered: Floats = np.zeros(len(times))
    covered[1::2] = np.cumsum(times[1::2] - times[0::2])
    covered[2::2] = covered[1:-1:2]
    return np.diff(np.interp(edges, times, covered))
