"""The runs of each condition taken together: means with their intervals, and shares.

Intervals are percentiles of bootstrapped means (Efron, 1979), of a fixed seed: the same results
give the same page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.experiment.results import Row, key_of
from elastic.experiment.sweep import Condition, Point, Sweep
from elastic.observe.series import Floats, np

NUM_RESAMPLES = 2000
COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Mean:
    """Of one number over runs; the bounds are its own value where there is one run only."""

    count: int
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if not self.count:
            return "-"
        bounds = f" [{self.low:.4g}, {self.high:.4g}]" if self.count > 1 else ""
        return f"{self.value:.4g}{bounds}"


@dataclass(frozen=True, slots=True)
class Summary:
    condition: Condition
    rows: tuple[Row, ...]
    recoveries_s: Floats
    """Ascending, of all its runs."""

    @property
    def num_succeeded(self) -> int:
        return sum(row["outcome"] == "succeeded" for row in self.rows)

    @property
    def num_hashes(self) -> int:
        """Different ones among the final weights."""
        return len({row["weights_sha256"] for row in self.rows if row["weights_sha256"]})

    def values(self, column: str) -> list[float]:
        found = (float(row[column]) for row in self.rows if row[column])
        return [value for value in found if math.isfinite(value)]

    def mean(self, column: str) -> Mean:
        return mean_of(self.values(column))

    def percentile(self, percent: float) -> float | None:
        """Of its recoveries: the smallest that is no shorter than so many of them."""
        if not len(self.recoveries_s):
            return None
        position = math.ceil(percent / 100 * len(self.recoveries_s)) - 1
        return float(self.recoveries_s[max(position, 0)])


def summaries(sweep: Sweep, rows: Sequence[Row]) -> list[Summary]:
    """In the order of the sweep. ValueError for a row with a number that is none."""
    found: list[Summary] = []
    for condition in sweep.conditions:
        keys = [key_of(Point(condition, seed)) for seed in sweep.seeds]
        own = tuple(row for row in rows if any(key.items() <= row.items() for key in keys))
        seconds = [float(s) for row in own for s in row["recoveries_s"].split()]
        found.append(Summary(condition, own, np.sort(np.array(seconds, dtype=np.float64))))
    return found


def mean_of(values: Sequence[float]) -> Mean:
    if not values:
        return Mean(0, math.nan, math.nan, math.nan)
    found = np.array(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(found, (NUM_RESAMPLES, len(found)))
    outside = 50 * (1 - COVERED)
    low, high = np.percentile(drawn.mean(axis=1), [outside, 100 - outside])
    return Mean(len(found), float(found.mean()), float(low), float(high))
