"""What torch compiles of the user's model: noticed and said, never asked for.

`session.model.compile()` is the user's call; who is taken for hung is elastic/control's decision.
"""

import logging
import sys
from typing import Any

from torch import nn

from workers.vitals import Vitals

log = logging.getLogger(__name__)


class Compilation:
    """Of one worker."""

    def __init__(self) -> None:
        self._num_graphs = 0

    def begin(self, model: nn.Module, vitals: Vitals) -> None:
        """A generation has formed: its first forward may compile again, which takes its time."""
        if any(module._compiled_call_impl is not None for module in model.modules()):
            vitals.forget("compute")

    def tell(self, generation: int, step: int) -> None:
        """After a step: log that something was compiled in it."""
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return
        num_graphs = dynamo.counters["stats"]["unique_graphs"]
        if num_graphs != self._num_graphs:
            where = (generation, step, num_graphs - self._num_graphs)
            log.info("generation=%d step=%d compiled graphs=%d", *where)
            self._num_graphs = num_graphs
