"""What the ranks tell each other of a step's time, with their votes: seconds, and who waited.

A rank that is slower than the others waits less in what all do together. The shortest of all ranks'
times there is what communication costs; whatever others spend beyond it, they wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """One rank's, of the step at hand. Seconds."""

    rank: int = 0
    gather_s: float = 0.0
    """Within its passes, while it waited for its peers' parts."""
    reduce_s: float = 0.0
    wants_row: bool = False
    """All are to put the next step on record (workers/health/anatomy.py)."""


NO_TIMING = Timing()


@dataclass(frozen=True, slots=True)
class Pace:
    """What all ranks' timings say, alike on each."""

    gather_s: float
    """Of the rank that waited least."""
    reduce_s: float
    idle_s: float
    """For so long a rank waited for slower ones, the mean over ranks."""
    wants_row: bool

    @property
    def waited_s(self) -> float:
        """For so long a stage waited for others, the mean over ranks: whatever it waits for between
        its passes is one's work."""
        return self.idle_s + self.gather_s


def pace_of(gather_s: Sequence[float], reduce_s: Sequence[float], *, wants_row: bool) -> Pace:
    """gather_s, reduce_s: by rank."""
    least_gather_s, least_reduce_s = min(gather_s), min(reduce_s)
    mean_s = (sum(gather_s) + sum(reduce_s)) / len(gather_s)
    idle_s = max(0.0, mean_s - least_gather_s - least_reduce_s)
    return Pace(least_gather_s, least_reduce_s, idle_s, wants_row)
