"""The ranks of a live script that others wait for: told in the journal, shown in the status; and
its steps, for the account of the run's time.

Who is waited for is elastic/control/reporting.py's rule.
"""

import logging
from collections.abc import Callable
from typing import Any

from elastic.control.events import Stepped
from elastic.control.reporting import missing
from elastic.protocol.messages.to_controller import ScriptMove, ScriptSteps

log = logging.getLogger(__name__)
STEPPED_EVERY_S = 1.0


class RollCall:
    """What the ranks of the newest generation have said of their script last."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        """note: puts something into the journal."""
        self._note = note
        self._said: dict[int, ScriptMove] = {}
        self._generation = 0
        self._stepped = 0, 0.0
        """The generation of the newest `Stepped`, and when it was."""
        self.reason = ""
        """Who is missed now, in words."""
        self.told = ""
        """The same as it was told first."""

    def hear(self, said: ScriptMove) -> None:
        if said.generation > self._generation:
            self._generation = said.generation
            self._said.clear()
        if said.generation == self._generation:
            self._said[said.rank] = said

    def hear_steps(self, said: ScriptSteps, at: float) -> Stepped | None:
        """Now and then; of each generation the first ones at once."""
        if not said.steps:
            return None
        generation, (before, since) = said.steps[-1].generation, self._stepped
        if generation == before and at < since + STEPPED_EVERY_S:
            return None
        self._stepped = generation, at
        return Stepped(generation, at)

    def look(self, generation: int, world_size: int) -> None:
        """Whoever is missed is told once."""
        line = missing(self._said, world_size) if generation == self._generation else ""
        if line and not self.told:
            log.warning('generation=%d reason="%s"', generation, line)
            self._note({"generation": generation, "reason": line})
        self.reason, self.told = line, line and (self.told or line)
