"""Where honest slowness may have looked like a hang: whoever comes there next is given more time.

A slow sample goes to another worker with its loss, and would take one warm worker after the other.
What makes a worker suspect is hang.py's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.protocol.membership import NumberSet


@dataclass(frozen=True, slots=True)
class PhaseOfStep:
    """Where in the run any worker may be."""

    step: int
    """Committed before."""
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step + 1}"


@dataclass(frozen=True, slots=True)
class Costly:
    """A place that has cost workers their lives as hung."""

    place: PhaseOfStep
    lost: NumberSet


def remember(costly: tuple[Costly, ...], place: PhaseOfStep, worker: int) -> tuple[Costly, ...]:
    """`worker` was ended there."""
    lost = lost_at(costly, place).add(worker)
    return (*(c for c in costly if c.place != place), Costly(place, lost))


def forget(costly: tuple[Costly, ...], step: int) -> tuple[Costly, ...]:
    """`step` is committed: nobody comes to an earlier place again."""
    return tuple(c for c in costly if c.place.step >= step)


def lost_at(costly: Iterable[Costly], place: PhaseOfStep) -> NumberSet:
    """Nobody, where it is not costly."""
    return next((c.lost for c in costly if c.place == place), NumberSet())
