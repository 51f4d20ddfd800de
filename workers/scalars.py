"""The learning rate and the gradient's norm of a step, as metrics.jsonl has them.

The norm comes from the pass that looks whether gradients are finite; that which clipping divides by
is workers/reduction/norm.py's.
"""

from collections.abc import Set

from workers.membership.member import Member
from workers.reduction.reducers import Reduced
from workers.step.vote import TakenWith
from workers.train_state.learning_rate import learning_rate
from workers.train_state.train_state import TrainState


class OwnGradients:
    """Whose squares a rank tells the others: each number is one rank's own."""

    def __init__(self) -> None:
        self._generation = 0
        self._is_own: dict[str, bool] = {}

    def among(self, reduced: Reduced, member: Member) -> Set[str]:
        """By name. Where every rank knows the squares of all, the first one tells them."""
        gradients = reduced.gradients
        if reduced.are_squares_known:
            return gradients.keys() if member.rank == 0 else frozenset()
        if member.generation != self._generation:
            self._generation = member.generation
            self._is_own.clear()
        if new := gradients.keys() - self._is_own.keys():
            position = member.strategy.position(member.rank, member.world_size)
            for name in new:
                layout = member.strategy.layout(f"model/{name}", gradients[name])
                self._is_own[name] = layout.own(position) is not None
        return {name for name in gradients if self._is_own[name]}


def taken_with(train_state: TrainState) -> TakenWith:
    """Of the step at hand, which is not yet applied."""
    scale = train_state.loss_scale
    return TakenWith(learning_rate(train_state.optimizer), 1.0 if scale is None else scale.value)
