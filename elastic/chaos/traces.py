"""Availability traces: how many machines there were, and when. CSV lines `seconds,count`.

A count holds from its line's time on; two lines of one time are a step. What a trace's losses mean
for a run is plan.py's.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from elastic.protocol.errors import WrongInput


class Drop(NamedTuple):
    """Machines that went at one time."""

    at_s: float
    part: float
    """Of the most that the trace ever has."""


def read_trace(path: Path) -> tuple[Drop, ...]:
    """The losses, in order; time counts from the first. WrongInput for a damaged or idle trace."""
    points: list[tuple[float, int]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            time, count = line.split(",")
            points.append((float(time), int(count)))
        except ValueError as error:
            raise WrongInput(f"{path} line {number} is {line!r}, must be seconds,count") from error
    if any(before[0] > after[0] for before, after in pairwise(points)):
        raise WrongInput(f"{path}: times must not decrease")
    most = max((count for _, count in points), default=0)
    falls = [(b[0], a[1] - b[1]) for a, b in pairwise(points) if b[1] < a[1]]
    if not falls:
        raise WrongInput(f"{path}: the trace has no loss")
    first_s = falls[0][0]
    return tuple(Drop(time - first_s, fall / most) for time, fall in falls)
