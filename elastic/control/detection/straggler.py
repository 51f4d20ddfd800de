"""Who is much slower than its peers at its own part of the steps, for long.

Pure functions of heartbeats. A rank's own part is its data and its computation: waiting for others
is not in it, and it is counted per micro-batch, of which ranks may have different numbers. Who has
more micro-batches than others waits longer for each that a slow dataset gives: only computation
tells whether a machine is slow.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elastic.protocol.messages.pulse import Heartbeat

LONG_STEPS = 20
"""So many steps in a row make a straggler: no pause of a moment does."""
MIN_LATE_S = 0.005
"""Per micro-batch; below, a factor says nothing."""


class Slowness(Enum):
    MACHINE = "machine"
    """Its computation takes longer than that of the others."""
    DATA = "data"
    """It computes as fast as the others, or nearly, and waits longer for its data."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Seconds of one kind, per micro-batch."""

    mine_s: float
    others_s: float
    """The median of the other members."""

    @property
    def factor(self) -> float:
        return self.mine_s / self.others_s if self.others_s > 0 else 1.0

    def is_beyond(self, factor: float) -> bool:
        return self.factor > factor and self.mine_s - self.others_s > MIN_LATE_S


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a member takes for its own part of a micro-batch."""

    worker: int
    own: Lateness
    computing: Lateness
    """Its own part without the waiting for data."""

    def slowness(self, factor: float) -> Slowness | None:
        """Why it is so many times slower than the others; None: it is not."""
        if not self.own.is_beyond(factor):
            return None
        return Slowness.MACHINE if self.computing.is_beyond(factor) else Slowness.DATA


Since: TypeAlias = Mapping[tuple[int, Slowness], int]
"""By worker and why it is slow: its number of steps when it became so."""


def paces(beats: Iterable[Heartbeat]) -> tuple[Pace, ...]:
    """Of the members of the newest generation that have done a step; none if there is only one."""
    measured = [h for h in beats if h.own.steps and h.generation]
    newest = max((h.generation for h in measured), default=0)
    members = sorted((h for h in measured if h.generation == newest), key=lambda h: h.worker)
    if len(members) < 2:
        return ()
    own = latenesses([h.own.seconds for h in members])
    computing = latenesses([h.own.seconds - h.own.data_s for h in members])
    workers = (h.worker for h in members)
    return tuple(Pace(*found) for found in zip(workers, own, computing, strict=True))


def latenesses(seconds: list[float]) -> list[Lateness]:
    """Each one's, in their order; there must be two."""
    ordered = sorted(seconds)
    return [Lateness(s, median_without(ordered, bisect_left(ordered, s))) for s in seconds]


def median_without(ordered: list[float], left_out: int) -> float:
    """Of all but one of some ascending numbers."""

    def at(i: int) -> float:
        return ordered[i + (i >= left_out)]

    num = len(ordered) - 1
    return (at((num - 1) // 2) + at(num // 2)) / 2


def stragglers(
    before: Since, beats: Iterable[Heartbeat], factor: float
) -> tuple[Since, tuple[tuple[Pace, Slowness], ...]]:
    """(who is slow, those who have been for long and why).

    before: the former at the last look. Why counts, too: who was slow for its data becomes slow for
    its machine anew.
    """
    beats = tuple(beats)
    num_steps = {h.worker: h.own.steps for h in beats}
    slow = [(pace, why) for pace in paces(beats) if (why := pace.slowness(factor)) is not None]
    since = {(p.worker, why): before.get((p.worker, why), num_steps[p.worker]) for p, why in slow}
    long = (s for s in slow if num_steps[s[0].worker] - since[s[0].worker, s[1]] >= LONG_STEPS)
    return since, tuple(long)
