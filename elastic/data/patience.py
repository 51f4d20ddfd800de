"""`Patience`: what the reading of windows has come to, and what is worth a word about it.

Decisions only, of what it is told with the time; the rest is elastic/on_ray/feed/actor.py's.
"""

from dataclasses import dataclass, field, replace

from elastic.data.stream import WindowKey

MAX_TRIES = 4
"""So often a window's reading may begin; then what ends the process is taken for its fault."""
WAIT_S = 10.0
"""A read that has not begun after so long is waiting for something."""
SLOW_S, SLOW_TIMES = 10.0, 10
"""A read is slow after so many times what others took, and not before this."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A window that is being read."""

    asked_at: float
    began_at: float | None = None
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Late:
    """What takes long: has_begun False where nobody has even started on it."""

    key: WindowKey
    has_begun: bool
    waited_s: float
    usual_s: float


@dataclass
class Patience:
    """Of one feed; times in seconds of one clock."""

    readings: dict[WindowKey, Reading] = field(default_factory=dict[WindowKey, Reading])
    told: set[WindowKey] = field(default_factory=set[WindowKey])
    has_told_waiting: bool = False
    num_read: int = 0
    total_s: float = 0.0
    """Of the reads that are done."""

    def asked(self, key: WindowKey, now: float) -> None:
        self.readings[key] = Reading(now)

    def began(self, key: WindowKey, now: float) -> int | None:
        """A process has begun to read it: how many have died of it before. None: it shall not, too
        many have. (What is read once more because Ray lost it is not counted.)"""
        reading = self.readings.get(key)
        if reading is None:
            return 0
        self.readings[key] = replace(reading, began_at=now, tries=reading.tries + 1)
        return reading.tries if reading.tries < MAX_TRIES else None

    def ended(self, key: WindowKey, now: float) -> None:
        reading = self.readings.pop(key)
        self.told.discard(key)
        if reading.began_at is not None:
            self.num_read += 1
            self.total_s += now - reading.began_at

    def late(self, now: float) -> list[Late]:
        """What takes long, each once; of what has not begun, the first of the feed."""
        usual_s = self.total_s / max(1, self.num_read)
        found: list[Late] = []
        for key, reading in sorted(self.readings.items()):
            if reading.began_at is None:
                waited_s = now - reading.asked_at
                if waited_s > WAIT_S and not self.has_told_waiting:
                    self.has_told_waiting = True
                    found.append(Late(key, False, waited_s, usual_s))
                continue
            waited_s = now - reading.began_at
            if waited_s > max(SLOW_S, SLOW_TIMES * usual_s) and key not in self.told:
                self.told.add(key)
                found.append(Late(key, True, waited_s, usual_s))
        return found
