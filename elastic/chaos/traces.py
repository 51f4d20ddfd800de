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
Point = tuple[float, int]
"""Seconds, and how many machines there are from then on."""


class Drop(NamedTuple):
    """Machines that went at one time."""

    at_s: float
    part: float
    """Of the most that the trace ever has."""


class Level(NamedTuple):
    """Machines that there are from one time on."""

    at_s: float
    part: float
    """Of the most that the trace ever has."""


def read_trace(path: Path) -> tuple[Drop, ...]:
    """The losses, in order; time counts from the first. WrongInput for a damaged or idle trace."""
    points = read_points(path)
    falls = [(b[0], a[1] - b[1]) for a, b in pairwise(points) if b[1] < a[1]]
    if not falls:
        raise WrongInput(f"{path}: the trace has no loss")
    first_s, most = falls[0][0], most_of(points)
    return tuple(Drop(time - first_s, fall / most) for time, fall in falls)


def read_levels(path: Path) -> tuple[Level, ...]:
    """What there is, in order, each other than the one before; time counts from the first machine.
    WrongInput for a damaged or empty trace."""
    points = read_points(path)
    most = most_of(points)
    if not most:
        raise WrongInput(f"{path}: the trace has no machine")
    first = next(i for i, (_, count) in enumerate(points) if count)
    last = dict(points[first:])  # of one time the last line holds
    levels = [Level(at - points[first][0], count / most) for at, count in last.items()]
    changes = [b for a, b in pairwise(levels) if a.part != b.part]
    return (levels[0], *changes)


def read_points(path: Path) -> list[Point]:
    """WrongInput for a damaged trace."""
    points: list[Point] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        point = point_of(line)
        if point is None:
            raise WrongInput(f"{path} line {number} is {shown(line)}, must be seconds,count")
        if points and points[-1][0] > point[0]:
            raise WrongInput(f"{path} line {number} is {shown(line)}: times must not decrease")
        points.append(point)
    return points


def most_of(points: list[Point]) -> int:
    return max((count for _, count in points), default=0)


def point_of(line: str) -> Point | None:
    """Seconds and how many machines there are from then on; None if that is not what it says."""
    try:
        seconds, count = line.split(",")
        point = float(seconds), int(count)
    except ValueError:
        return None
    return point if abs(point[0]) <= MAX_S and point[1] >= 0 else None  # NaN is not
