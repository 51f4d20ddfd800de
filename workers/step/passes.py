"""How a step's micro-batches go through forward and backward on this rank: `Passes`, and the plain
way, a backward behind each forward.

What is done with the gradients is the reducer's (workers/reduction/reducers.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from workers.reduction.reducers import Reducer
from workers.step.microbatches import check_loss

EndMicrobatch = Callable[[], Sequence[Tensor]]
"""Gives the floating buffers that a micro-batch has left behind."""
Loss = tuple[Tensor, Tensor | None]
"""To differentiate, and its weight or None."""


class Passes(Protocol):
    """Of one rank, for a generation."""

    def begin(self, step: int) -> None:
        """Before the first micro-batch of every attempt at a step, after `step` committed ones."""
        ...

    def before_forward(self, microbatch_id: int) -> None:
        """The user's forward of it comes next."""
        ...

    def loss_of(self, returned: Any) -> Loss | None:
        """What the user's loss has returned, checked; None: another rank has it. WrongInput."""
        ...

    def backward(
        self,
        microbatch_id: int,
        loss: Tensor | None,
        reducer: Reducer,
        end_microbatch: EndMicrobatch,
        is_last: bool,
    ) -> None:
        """The forward of a micro-batch has ended. Those backwards that are due now, each told to
        the reducer. loss: scaled; None as `loss_of` gave it. is_last: no other forward follows."""
        ...

    def reset(self) -> None:
        """After a forward or backward that may not have come to its end."""
        ...


class PlainPasses:
    """Of a rank that computes whole micro-batches, one after another."""

    def begin(self, step: int) -> None:
        pass

    def before_forward(self, microbatch_id: int) -> None:
        pass

    def loss_of(self, returned: Any) -> Loss:
        return check_loss(returned)

    def backward(
        self,
        microbatch_id: int,
        loss: Tensor | None,
        reducer: Reducer,
        end_microbatch: EndMicrobatch,
        is_last: bool,
    ) -> None:
        assert loss is not None
        reducer.before_backward(is_last)
        loss.backward()
        reducer.after_backward(microbatch_id, end_microbatch())

    def reset(self) -> None:
        pass
