"""How far a script is in its passes over data sets: what a report records of them.

Numbers only. What is read is passes.py's.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """In the passes over one data set."""

    number: int = 0
    """Of the pass at hand, or of the next one."""
    row: int = 0
    """How far it is: all ranks together have been given so many of its rows."""
    window: int = 0
    """Rows that are shuffled together in it; 0: it is not shuffled."""
    missing: tuple[tuple[int, int], ...] = ()
    """Before that row, the positions from one to another that nobody has been given, as a rank was
    lost with them."""

    @property
    def first(self) -> int:
        """No position before this one is in the rest of the pass."""
        return min([self.row, *(first for first, _ in self.missing)])


class Places:
    """Of one call of a script, by data set."""

    def __init__(self, numbers: dict[str, int] | None = None) -> None:
        """numbers: of the pass that comes first, for those that are not at their first."""
        self._next = dict(numbers or {})
        self._at: dict[str, Place] = {}

    def of(self, name: str) -> Place:
        """Of the newest pass that has begun, or of the next one."""
        return self._at.get(name) or Place(number=self._next.get(name, 0))

    def numbers(self) -> dict[str, int]:
        """Of the passes at hand or next: who begins again from here begins with these."""
        return {name: self.of(name).number for name in {*self._next, *self._at}}

    def begin(self, name: str, where: Place | None, window: int) -> Place:
        """The next pass begins, or goes on where it was; then it is shuffled as it was before."""
        if where is None:
            where = Place(number=self._next.get(name, 0), window=window)
        elif not where.window or not window:
            where = replace(where, window=window)
        self._next[name], self._at[name] = where.number + 1, where
        return where

    def move(
        self, name: str, number: int, row: int, missing: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """The script has been given what lies before a row, but for what is missing."""
        if (place := self._at.get(name)) is not None and place.number == number:
            self._at[name] = replace(place, row=row, missing=missing)

    def end(self, name: str, number: int) -> None:
        """The script has seen that a pass is over."""
        if (place := self._at.get(name)) is not None and place.number == number:
            del self._at[name]
