"""How a step's micro-batches go through forward and backward on this rank: `Passes`, and the plain
way, a backward behind each forward.

What is done with the gradients is the reducer's (workers/reduction/reducers.py).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from workers.reduction.reducers import Reducer
from workers.step.buffers import TrackedBuffers
from workers.step.microbatches import check_loss

Loss = tuple[Tensor, Tensor | None]
"""To differentiate, and its weight or None."""


class Passes(Protocol):
    """Of one rank, for a generation."""

    in_backward: int
    """The micro-batch whose backward runs now, or has run last."""

    @property
    def has_loss(self) -> bool:
        """The forward that runs now, or has run last, ends in the loss, which counts here."""
        ...

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """The micro-batch of each forward of a step; ids: this rank's, each once or more often."""
        ...

    def loader(self, loader: Any) -> Any:
        """What this rank's micro-batches come from; loader: the worker's own
        (`workers.data.loader.AnyLoader`)."""
        ...

    def begin(self, step: int) -> None:
        """Before the first micro-batch of every attempt at a step, after `step` committed ones."""
        ...

    def before_forward(self, microbatch_id: int) -> None:
        """The user's forward of it comes next."""
        ...

    def loss_of(self, returned: Any) -> Loss | None:
        """What the user's loss has returned, checked; None: another rank has it. WrongInput."""
        ...

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        """The forward of a micro-batch has ended. Those backwards that are due now, each told to
        the reducer. loss: scaled; None as `loss_of` gave it. num_left: forwards that follow."""
        ...

    def reset(self) -> None:
        """After a forward or backward that may not have come to its end."""
        ...


class NoPasses:
    """Of a rank that computes no micro-batch."""

    in_backward = -1

    @property
    def has_loss(self) -> bool:
        return True

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def loader(self, loader: Any) -> Any:
        return loader

    def begin(self, step: int) -> None:
        pass

    def before_forward(self, microbatch_id: int) -> None:
        pass

    def loss_of(self, returned: Any) -> Loss | None:
        raise AssertionError("this rank has no micro-batch")

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        raise AssertionError("this rank has no micro-batch")

    def reset(self) -> None:
        pass


class PlainPasses(NoPasses):
    """Of a rank that computes whole micro-batches, one after another."""

    def __init__(self, reducer: Reducer, buffers: TrackedBuffers) -> None:
        self._reducer, self._buffers = reducer, buffers

    def loss_of(self, returned: Any) -> Loss:
        return check_loss(returned)

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        assert loss is not None
        self.in_backward = microbatch_id
        self._reducer.before_backward(not num_left)
        loss.backward()
        self._reducer.after_backward(microbatch_id, self._buffers.end_microbatch())
