"""`Tiers`: which segments of a growing file become one, so that there are few after days, too.

What is done with them is journal.py's.
"""

from collections.abc import Iterator

Span = tuple[int, int]
"""Offsets of a segment's first byte, and of the first one behind it."""
FAN_IN = 16
KEPT = 12
"""The newest stay as they are: whoever follows the file reads them one by one, a minute late
at most."""
MAX_BYTES = 16 * 2**20
"""No segment becomes larger: bringing it over holds up what is newer."""


class Tiers:
    """Segments by how often they were merged; a merged one takes the place of its first."""

    def __init__(self) -> None:
        self._tiers: list[list[Span]] = [[]]

    def add(self, start: int, end: int) -> None:
        self._tiers[0].append((start, end))

    def clear(self) -> None:
        """The file was joined."""
        self._tiers = [[]]

    def due(self) -> Iterator[list[Span]]:
        """Neighbours that are to become one, the oldest first; each group counts as merged once the
        next one is asked for."""
        for tier, spans in enumerate(self._tiers):  # the last one may be added meanwhile
            while len(spans) >= FAN_IN + (KEPT if tier == 0 else 0):
                group = spans[:FAN_IN]
                merged = group[0][0], group[-1][1]
                if merged[1] - merged[0] <= MAX_BYTES:
                    yield group
                    if tier + 1 == len(self._tiers):
                        self._tiers.append([])
                    self._tiers[tier + 1].append(merged)
                del spans[:FAN_IN]
