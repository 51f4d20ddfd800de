"""What torch compiles of the user's model: said in the log, and no hang while it lasts.

`session.model.compile()` is the user's call; who is taken for hung is elastic/control's decision.
Nothing of torch.compile is imported for it.
"""

import logging
from contextlib import ExitStack
from typing import Any

from workers.health.vitals import Vitals
from workers.torch_private.compilation import hear_compilations, num_compiled_graphs

log = logging.getLogger(__name__)


class Compilation:
    """Of one worker: `compile` is its phase while torch.compile is at work in its process."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals, self._is_heard = vitals, False
        self._current = ExitStack()
        self._num_graphs = 0

    def hear(self) -> None:
        """From now on, if the user's code has asked for a compilation; cheap to call often."""
        if not self._is_heard:
            self._is_heard = hear_compilations(self._begin, self._end)

    def _begin(self, _: Any) -> None:
        self._current.enter_context(self._vitals.aside("compile"))

    def _end(self, _: Any) -> None:
        self._current.close()

    def tell(self, generation: int, step: int) -> None:
        """After a step: log that something was compiled in it."""
        num_graphs = num_compiled_graphs()
        if num_graphs != self._num_graphs:
            more = num_graphs - self._num_graphs
            log.info("generation=%d step=%d compiled graphs=%d", generation, step, more)
            self._num_graphs = num_graphs
