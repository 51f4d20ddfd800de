"""`Ahead`: which windows to read now and which to forget, within a budget of bytes.

Decisions only; who carries them out is elastic/on_ray/feed/actor.py's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from elastic.data.plan import Plan
from elastic.data.stream import Span, Stream, WindowKey

RESERVE = 1 / 8
"""Of the budget, for the store's own losses; or the largest window, if that is more: a worker may
hold one for a moment after it has been forgotten here."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do now."""

    start: tuple[WindowKey, ...]
    forget: tuple[WindowKey, ...]


@dataclass
class Ahead:
    """The windows that are held or being read."""

    plan: Plan
    stream: Stream
    held: dict[WindowKey, int] = field(default_factory=dict[WindowKey, int])
    """Read, and their bytes."""
    running: set[WindowKey] = field(default_factory=set[WindowKey])
    end: int | None = None
    """Of the stream's elements the run uses no more than so many; None: not known."""
    growth: float | None = None
    """Bytes of a window in memory for each byte that the footers promise, at most so far; None:
    nothing has been read yet, and only what somebody waits for is."""

    def read(self, key: WindowKey, size_bytes: int) -> None:
        """A window has been read."""
        self.running.discard(key)
        self.held[key] = size_bytes
        planned = self._planned_bytes(key)
        self.growth = max(self.growth or 1.0, size_bytes / planned) if planned else self.growth

    def failed(self, key: WindowKey) -> None:
        """A window cannot be read, or has been lost: it may be started again."""
        self.running.discard(key)
        self.held.pop(key, None)

    def turn(self, oldest: WindowKey, needed: WindowKey) -> Turn:
        """oldest: what lies before it has been committed. needed: somebody waits for it, so it is
        read whatever the budget says; others make room: first what this step has passed (it is read
        again if the step fails, or if another worker is not there yet), then the last of the
        stream. The caller does all of it before the next turn.
        """
        oldest = min(oldest, needed)
        forget = sorted(k for k in self.held if k < oldest)
        for key in forget:
            del self.held[key]
        start = [] if needed in self.held or needed in self.running else [needed]
        self.running.update(start)
        if self.growth is None:
            return Turn(tuple(start), tuple(forget))
        forget += self._make_room(needed)
        used = sum(self._sizes().values())
        last = None if self.end is None else self.stream.find(self.end - 1)
        for key in self.stream.follow(oldest):
            if len(self.running) >= self.plan.source.max_reads:
                break
            if isinstance(last, Span) and key > last.key:
                break
            if key in self.held or key in self.running or key < needed:
                continue
            size = self._expected_bytes(key)
            used += size
            if used > self._limit(size):
                break
            start.append(key)
            self.running.add(key)
        return Turn(tuple(start), tuple(forget))

    def _make_room(self, needed: WindowKey) -> list[WindowKey]:
        """What has to go, for the needed one and one more after it."""
        _, after = islice(self.stream.follow(needed), 2)
        is_here = after in self.held or after in self.running
        wanted = 0.0 if is_here else self._expected_bytes(after)
        used, limit = sum(self._sizes().values()), self._limit(wanted)
        last_first = sorted(self.held, reverse=True)
        passed = [k for k in last_first if k < needed]
        gone: list[WindowKey] = []
        for key in [*passed, *(k for k in last_first if k > needed)]:
            if used + (wanted if key < needed else 0.0) <= limit:
                break
            used -= self.held.pop(key)
            gone.append(key)
        return gone

    def _limit(self, size: float = 0.0) -> float:
        """With one more window of `size`; what is being read counts as if it were held."""
        budget = self.plan.source.prefetch_bytes
        return budget - max(RESERVE * budget, size, *self._sizes().values())

    def _sizes(self) -> Mapping[WindowKey, float]:
        return {**self.held, **{k: self._expected_bytes(k) for k in self.running}}

    def _expected_bytes(self, key: WindowKey) -> float:
        return (self.growth or 1.0) * self._planned_bytes(key)

    def _planned_bytes(self, key: WindowKey) -> int:
        return sum(unit.size_bytes for unit in self.plan.windows(key.epoch)[key.window])
