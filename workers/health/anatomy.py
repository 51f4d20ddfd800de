"""Where the seconds of this rank's steps go: parts of committed steps, and its peak memory.

`Vitals` tells of every phase that it enters; a row leaves the process now and then
(docs/running.md, `anatomy.jsonl`). What of a wait is a slower rank's, the vote says. The pulse
process imports this file, too: no torch here.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

from workers.step.timing import Pace, Timing

PARTS = ("data", "compute", "gather", "reduce", "wait", "vote", "apply")
"""`gather` and `reduce`: without waiting for slower ranks, which is `wait`."""
_DATA, _COMPUTE, _GATHER, _REDUCE, _WAIT, _VOTE, _APPLY = range(len(PARTS))
_PART_OF = {
    "data": _DATA,
    "feed": _DATA,
    "gather": _GATHER,
    "exchange": _GATHER,
    "reduce": _REDUCE,
    "vote": _VOTE,
    "apply": _APPLY,
    "save": _APPLY,
}
"""By phase (vitals.py); whatever else the main thread does within a step counts as computation."""
ROW_EVERY_S = 0.125
"""Seconds between two rows of a rank, times the number of ranks: a run writes eight a second at
most, however many ranks it has. Each slower step has a row of its own."""
SAY_EVERY_S = 1.0
MAX_SPANS = 256
"""Of a step that is traced; of longer ones the first."""


class Anatomy:
    """Used by the main thread only. Times are in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: that of the vitals."""
        self._clock, now = clock, clock()
        self._phase, self._since = "starting", now
        self._step = [0.0] * len(PARTS)
        """Of the step at hand, by part."""
        self._spans: list[tuple[str, float]] | None = None
        """Of the step at hand, if it is traced: phases, one after another, and their seconds."""
        self._is_wanted = True
        """The next step is to be traced."""
        self._sums = [0.0] * len(PARTS)
        """Of the committed steps that no row has yet."""
        self._num_steps = self._generation = self._world_size = 0
        self._row_at = self._said_at = now
        self._rows: list[dict[str, Any]] = []

    def enter(self, phase: str, now: float) -> None:
        """The main thread goes on to `phase`."""
        spent_s = now - self._since
        self._step[_PART_OF.get(self._phase, _COMPUTE)] += spent_s
        if self._spans is not None and len(self._spans) < MAX_SPANS:
            self._spans.append((self._phase, spent_s))
        self._phase, self._since = phase, now

    def begin(self, generation: int, now: float) -> None:
        """An attempt at a step; what was before it belongs to none."""
        if generation != self._generation:  # the rows of all its members are of the same steps
            self._begin_row(generation, is_wanted=True)
        self._step, self._since = [0.0] * len(PARTS), now
        self._spans = [] if self._is_wanted else None
        if self._is_wanted:
            self._row_at = now

    def timing(self, rank: int, world_size: int) -> Timing:
        """For the vote of this step. Rank 0 says when all are to make a row."""
        self._world_size = world_size
        is_due = rank == 0 and self._since - self._row_at >= ROW_EVERY_S * world_size
        return Timing(rank, self._step[_GATHER], self._step[_REDUCE], wants_row=is_due)

    def end(self, pace: Pace, step: int, rank: int, gpu_memory: Callable[[], int | None]) -> float:
        """The step is committed; its seconds. gpu_memory: the peak in bytes; None without a GPU."""
        now = self._clock()
        self.enter("user", now)
        parts = self._step
        for part, exposed_s in ((_GATHER, pace.gather_s), (_REDUCE, pace.reduce_s)):
            waited_s = max(0.0, parts[part] - exposed_s)
            parts[part] -= waited_s
            parts[_WAIT] += waited_s
        self._sums = [a + b for a, b in zip(self._sums, parts, strict=True)]
        self._num_steps += 1
        if self._spans is not None:
            self._rows.append(self._row(step, rank, gpu_memory()))
            self._begin_row(self._generation, is_wanted=False)
        self._is_wanted |= pace.wants_row
        return sum(parts)

    def take(self, *, is_last: bool = False) -> tuple[dict[str, Any], ...]:
        """Rows to be sent: none most of the time. is_last: whatever there is."""
        if not is_last and self._since - self._said_at < SAY_EVERY_S:
            return ()
        rows, self._rows, self._said_at = self._rows, [], self._since
        return tuple(rows)

    def _row(self, step: int, rank: int, gpu_memory_bytes: int | None) -> dict[str, Any]:
        return {
            "step": step,
            "steps": self._num_steps,
            "generation": self._generation,
            "rank": rank,
            "world_size": self._world_size,
            "time": time.time(),
            "step_s": round(sum(self._sums), 6),
            **{f"{part}_s": round(s, 6) for part, s in zip(PARTS, self._sums, strict=True)},
            "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "gpu_memory_bytes": gpu_memory_bytes,
            "spans": [[phase, round(s, 6)] for phase, s in self._spans or ()],
        }

    def _begin_row(self, generation: int, *, is_wanted: bool) -> None:
        self._sums, self._num_steps = [0.0] * len(PARTS), 0
        self._generation, self._is_wanted = generation, is_wanted
