"""Which blocks take something of the batch beside what the block before them returns, as a mask:
found by one micro-batch whose tensors are absent, too.

What a rank does that has none of these is stand_in.py's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workers.parallel.pipeline.absent import absent_like, written_by
from workers.parallel.pipeline.chain import Chain, Probe
from workers.parallel.pipeline.trees import tensors_in
from workers.torch_private.dispatch import tree_flatten, tree_map_only


def find_readers(
    model: nn.Module,
    chain: Chain,
    loss: Callable[[Any], Any],
    batch: Any,
    device: torch.device | None = None,
) -> tuple[int, ...]:
    """Their numbers: all of them, if the loss could not be computed without the batch's values.
    What a block's code or the code behind it takes counts; what the chain brings does not."""
    everyone = tuple(range(len(chain.names)))
    without = tree_map_only(Tensor, absent_like, batch)
    probe = _Readers(model, chain, device, tensors_in(without))
    with probe.in_place():
        try:
            loss(without)
        except Exception:  # the user's code wants values, in whatever words
            return everyone
    return tuple(sorted(probe.readers))


class _Readers(Probe):
    """Follows what is computed of the batch alone."""

    def __init__(
        self, model: nn.Module, chain: Chain, device: torch.device | None, batch: list[Tensor]
    ) -> None:
        super().__init__(model, chain.names, device)
        self._chain = chain
        self._of_batch = {id(tensor): tensor for tensor in batch}
        """By id, which is taken as long as the tensor is kept."""
        self.readers: set[int] = set()

    def on_call(self, number: int, taken: list[Any]) -> None:
        for argument in self._chain.arguments[number]:
            self._of_batch.pop(id(taken[argument.position]), None)

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        taken = tree_flatten((args, kwargs))[0]
        if any(id(value) in self._of_batch for value in taken):
            self.readers.add(self.place)
            for tensor in (*tensors_in(result), *written_by(func, args, kwargs)):
                self._of_batch[id(tensor)] = tensor
