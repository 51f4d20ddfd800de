"""The batches of a step in the order of its forwards. A rank that has several stages has a forward
of each micro-batch for every one: it is loaded once, and the same in all of them.

In which order the forwards come is a strategy's (`Passes.order`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np

from workers.data.loader import AnyLoader, LoadedBatch


class StepBatches:
    """Of one attempt at a step."""

    def __init__(
        self, loader: AnyLoader, step: int, order: Sequence[int], is_cancelled: Callable[[], bool]
    ) -> None:
        """order: the micro-batch of each forward."""
        self._loader, self._step, self._is_cancelled = loader, step, is_cancelled
        self._order = list(order)
        self._left = Counter(order)
        self._kept: dict[int, LoadedBatch] = {}

    def coming(self) -> LoadedBatch:
        """Of the next forward, as long as it is being loaded: without rows."""
        return LoadedBatch(self._step, self._order[0], np.empty(0, np.int64), None)

    def take(self) -> LoadedBatch:
        """For the next forward. What the user does to the batch in one is not seen in another."""
        microbatch_id = self._order.pop(0)
        loaded = self._kept.pop(microbatch_id, None)
        if loaded is None:
            loaded = self._loader.next(self._step, microbatch_id, self._is_cancelled)
        self._left[microbatch_id] -= 1
        if self._left[microbatch_id]:
            self._kept[microbatch_id] = replace(loaded, batch=deepcopy(loaded.batch))
        return loaded
