"""Who is much slower than its peers at its own part of the steps, for long.

Pure functions of heartbeats. A rank's own part is its data and its computation: waiting for others
is not in it, and it is counted per micro-batch, of which ranks may have different numbers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.protocol.messages.pulse import Heartbeat

LONG_STEPS = 20
"""So many steps in a row make a straggler: no pause of a moment does."""
MIN_LATE_S = 0.005
"""Per micro-batch; below, a factor says nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a member takes for its own part of a micro-batch."""

    worker: int
    own_s: float
    others_s: float
    """The median of the other members."""

    @property
    def factor(self) -> float:
        return self.own_s / self.others_s if self.others_s > 0 else 1.0

    def is_slower(self, factor: float) -> bool:
        return self.factor > factor and self.own_s - self.others_s > MIN_LATE_S


def paces(beats: Iterable[Heartbeat]) -> tuple[Pace, ...]:
    """Of the members of the newest generation that have done a step; none if there is only one."""
    measured = [h for h in beats if h.own_steps and h.generation]
    newest = max((h.generation for h in measured), default=0)
    members = [h for h in measured if h.generation == newest]
    ordered = sorted(h.own_s for h in members)
    if len(ordered) < 2:
        return ()
    return tuple(
        Pace(h.worker, h.own_s, median_without(ordered, bisect_left(ordered, h.own_s)))
        for h in sorted(members, key=lambda h: h.worker)
    )


def median_without(ordered: list[float], left_out: int) -> float:
    """Of all but one of some ascending numbers."""

    def at(i: int) -> float:
        return ordered[i + (i >= left_out)]

    num = len(ordered) - 1
    return (at((num - 1) // 2) + at(num // 2)) / 2


def stragglers(
    before: Mapping[int, int], beats: Iterable[Heartbeat], factor: float
) -> tuple[dict[int, int], tuple[Pace, ...]]:
    """(worker -> its number of steps when it became slow, those who have been slow for long).

    before: the former at the last look.
    """
    beats = tuple(beats)
    num_steps = {h.worker: h.own_steps for h in beats}
    slow = [pace for pace in paces(beats) if pace.is_slower(factor)]
    since = {p.worker: before.get(p.worker, num_steps[p.worker]) for p in slow}
    long = (p for p in slow if num_steps[p.worker] - since[p.worker] >= LONG_STEPS)
    return since, tuple(long)
