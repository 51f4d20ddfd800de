"""Compilation in the middle of a step is no hang: torch.compile says when it begins and ends.

Nothing is imported for it; without torch.compile there is nothing to hear.
"""

import sys
from contextlib import ExitStack
from typing import Any

from workers.vitals import Vitals


class Compilations:
    """Makes `compile` the phase of a worker while torch.compile is at work in its process."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals, self._is_heard = vitals, False
        self._current = ExitStack()

    def hear(self) -> None:
        """From now on, if the user's code has asked for a compilation; cheap to call often."""
        module = sys.modules.get("torch._dynamo.callback")
        if module is not None and not self._is_heard:
            self._is_heard = True
            module.on_compile_start(self._begin)
            module.on_compile_end(self._end)

    def _begin(self, _: Any) -> None:
        self._current.enter_context(self._vitals.aside("compile"))

    def _end(self, _: Any) -> None:
        self._current.close()
