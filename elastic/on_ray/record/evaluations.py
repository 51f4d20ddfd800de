"""Results of `session.evaluate` as members say them: each goes on record once.

A result is said again by whoever follows the lowest rank, and to a new controller; and it is told
to members that missed it. What they remember of it is workers/step/evaluation_log.py's.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from elastic.protocol.messages.to_controller import Evaluation


class Evaluations:
    """The newest result of each worker, and the newest on record."""

    def __init__(self, record: Callable[[dict[str, Any]], None]) -> None:
        self._record = record
        self._of: dict[int, Evaluation] = {}
        self._heard: Evaluation | None = None
        """The newest that a lowest rank has said. Whoever joins at a pause may have missed it."""
        self.recorded = (-1, 0)
        """Step and ordinal of the newest on record."""

    def hear(self, said: Evaluation) -> None:
        """The lowest rank has one, or says again which was the last."""
        place = said.step, said.ordinal
        if self._heard is None or place > (self._heard.step, self._heard.ordinal):
            self._heard = said
        if place > self.recorded:
            self.recorded = place
            line = asdict(said)
            self._record({k: line[k] for k in ("step", "ordinal", "generation", "values")})

    def hear_last(self, worker: int, said: Evaluation | None) -> None:
        """What a member that is suspended has completed last."""
        self._of.pop(worker, None)
        if said is not None:
            self._of[worker] = said

    def newest(self, workers: Iterable[int]) -> Evaluation | None:
        """Of these workers, or of whoever was the lowest rank."""
        found = [self._of[w] for w in workers if w in self._of]
        if self._heard is not None:
            found.append(self._heard)
        return max(found, key=lambda e: (e.step, e.ordinal), default=None)

    def go_back(self, step: int) -> None:
        """What came after `step` will be done again."""
        self._of = {w: e for w, e in self._of.items() if e.step <= step}
        if self._heard is not None and self._heard.step > step:
            self._heard = None
        self.recorded = min(self.recorded, (step + 1, -1))
