"""A pass for the others: a rank that has no micro-batch left serves its rows to their forward and
backward, and takes its slices of their gradients, without computing anything.

It makes the collectives of its own last pass once more, in their order;
tests/workers/test_fsdp.py compares with plain training.
"""

from workers.parallel.fsdp2_private.parameters import ParameterGroup
from workers.parallel.fsdp2_private.sharded_model import ShardedModel


class ServedPass:
    """One generation's. `noted_gather` and `noted_slices` while a pass is made, then `end_pass`."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._noted: list[tuple[ParameterGroup, bool]] = []  # and whether its gradient was sent
        self._last: list[tuple[ParameterGroup, bool]] = []

    def begin(self) -> None:
        """Of a step."""
        self._noted = []

    def note_gather(self, group: ParameterGroup) -> None:
        self._noted.append((group, False))

    def note_slices(self, group: ParameterGroup) -> None:
        self._noted.append((group, True))

    def end_pass(self) -> None:
        self._last, self._noted = self._noted, []

    def make(self) -> None:
        """The last pass's collectives; whatever the hooks do in one, they do again."""
        for group, is_gradient in self._last:
            if is_gradient:
                group.send_nothing()
            else:
                group.gather()
        self._model.end_backward()
