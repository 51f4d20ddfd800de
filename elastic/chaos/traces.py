"""Availability traces: how many machines there were, and when. CSV lines `seconds,count`.

A count holds from its line's time on; two lines of one time are a step. What a trace's losses mean
for a run is plan.py's.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from elastic.chaos.text import read_text, shown
from elastic.protocol.errors import WrongInput

MAX_S = 1e9


class Drop(NamedTuple):
    """Machines that went at one time."""

    at_s: float
    part: float
    """Of the most that the trace ever has."""


def read_trace(path: Path) -> tuple[Drop, ...]:
    """The losses, in order; time counts from the first. WrongInput for a damaged or idle trace."""
    points: list[tuple[float, int]] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        point = point_of(line)
        if point is None:
            raise WrongInput(f"{path} line {number} is {shown(line)}, must be seconds,count")
        points.append(point)
    if any(before[0] > after[0] for before, after in pairwise(points)):
        raise WrongInput(f"{path}: times must not decrease")
    most = max((count for _, count in points), default=0)
    falls = [(b[0], a[1] - b[1]) for a, b in pairwise(points) if b[1] < a[1]]
    if not falls:
        raise WrongInput(f"{path}: the trace has no loss")
    first_s = falls[0][0]
    return tuple(Drop(time - first_s, fall / most) for time, fall in falls)


def point_of(line: str) -> tuple[float, int] | None:
    """Seconds and how many machines there are from then on; None if that is not what it says."""
    try:
        seconds, count = line.split(",")
        point = float(seconds), int(count)
    except ValueError:
        return None
    return point if abs(point[0]) <= MAX_S and point[1] >= 0 else None  # NaN is not
