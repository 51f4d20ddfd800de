"""The ranks of a live script that others wait for: told in the journal, shown in the status.

Who they are is elastic/control/reporting.py's rule.
"""

import logging
from collections.abc import Callable
from typing import Any

from elastic.control.reporting import missing
from elastic.protocol.messages.to_controller import ScriptMove

log = logging.getLogger(__name__)


class RollCall:
    """What the ranks of the newest generation have said of their script last."""

    def __init__(self, note: Callable[[dict[str, Any]], None]) -> None:
        """note: puts something into the journal."""
        self._note = note
        self._said: dict[int, ScriptMove] = {}
        self._generation = 0
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

    def look(self, generation: int, world_size: int) -> None:
        """Whoever is missed is told once."""
        line = missing(self._said, world_size) if generation == self._generation else ""
        if line and not self.told:
            log.warning('generation=%d reason="%s"', generation, line)
            self._note({"generation": generation, "reason": line})
        self.reason, self.told = line, line and (self.told or line)
