"""Where a gradient stops being finite: rank, micro-batch and parameter.

A step costs nothing for it. One that is about to stop the run is done again, which gives the same
numbers, with a hook on every parameter. Who counts such steps is
workers/train_state/train_state.py.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from workers.distributed.exchange import gather_json
from workers.membership.member import Member
from workers.parallel.strategy import Passes
from workers.reduction.reducers import Magnitude, Reduced
from workers.scalars import OwnGradients
from workers.step.vote import MicrobatchRecord, Repeated, Vote

ADVICE = "Lower the learning rate, set clip_norm"


class Inspection:
    """Of one worker's steps, by attempt: `ask` once, then the next attempt is inspected."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._own = OwnGradients()
        self._asked = (0, -1)  # generation, step
        self._hooks: list[RemovableHandle] = []
        self.found: tuple[int, str] | None = None
        """This rank's first micro-batch with a gradient that is not finite, and the parameter."""

    @property
    def is_on(self) -> bool:
        """In this attempt; as agreed by the members of this generation."""
        return self._asked == (self._member.generation, self._member.train_state.step)

    def ask(self, generation: int, step: int) -> None:
        self._asked, self.found = (generation, step), None

    def magnitude(self, reduced: Reduced) -> Magnitude:
        """Of the step's sums, on this rank."""
        assert self._member.group is not None
        own = self._own.among(reduced, self._member)
        return reduced.magnitude(self._member.group.read, own)

    def before_backward(self, passes: Passes) -> None:
        """passes: know whose backward runs."""
        if self.is_on:
            leaves = self._member.strategy.leaves(self._member.train_state.parameters)
            trained = ((name, t) for name, t in leaves.items() if t.requires_grad)
            self._hooks = [t.register_hook(self._look(name, passes)) for name, t in trained]

    def after_backward(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, name: str, passes: Passes) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if self.found is None and not bool(torch.isfinite(gradient).all()):
                self.found = (passes.in_backward, name)

        return look


def judge(
    inspection: Inspection, vote: Vote, records: Sequence[MicrobatchRecord], member: Member
) -> None:
    """Of a step that is not finite: if it is one too many, the run stops with it and says where it
    began, which another attempt finds out. A collective. Raises Repeated and PeerLost."""
    train_state = member.train_state
    if train_state.skipped_in_a_row < train_state.max_nonfinite:
        return
    member.drop_gradients()  # the run stops with this step: nobody rolls forward to it
    if vote.divisor == 0:
        train_state.first_nonfinite = told_of_no_weight(train_state.step + 1)
    elif not inspection.is_on:
        inspection.ask(member.generation, train_state.step)
        raise Repeated
    else:
        train_state.first_nonfinite = explain(inspection, records, member)


def explain(inspection: Inspection, records: Sequence[MicrobatchRecord], member: Member) -> str:
    """What the ranks have found, the lowest micro-batch first. A collective. Raises PeerLost."""
    assert member.group is not None
    gathered = gather_json(member.group, inspection.found)
    mesh, found = member.mesh, [(one, rank) for rank, one in enumerate(gathered) if one]
    if not found:
        return told([])
    # Where ranks share a micro-batch, its backward comes to the last one first, which has the loss.
    found.sort(key=lambda each: (each[0][0], -mesh.position(each[1])))
    first = found[0][0][0]
    mine = [repr(record.loss) for record in records if record.microbatch_id == first]
    losses = [float(loss) for of_rank in gather_json(member.group, mine) for loss in of_rank]
    loss = losses[0] if losses else math.nan
    return told([(one[0], rank, one[1], loss) for one, rank in found])


def told(found: list[tuple[int, int, str, float]]) -> str:
    """found: micro-batch id, rank, parameter, loss; that which is told first."""
    if not found:
        return f"every micro-batch's gradient is finite, their sum is not. {ADVICE}"
    microbatch_id, rank, name, loss = found[0]
    what = f"loss {loss:g}" if math.isfinite(loss) else f"loss {loss}"
    more = f"; {len(found)} ranks have some" if len(found) > 1 else ""
    return (
        f"the first is of parameter {name!r}, in micro-batch {microbatch_id} on rank {rank} "
        f"({what}){more}. {ADVICE}"
    )


def told_of_no_weight(step: int) -> str:
    return (
        f"the total weight of step {step} is 0: loss() returned (sum, 0) for each of its "
        "micro-batches, and a step's sum is divided by its total weight. Return how many samples "
        "or tokens each sum is over"
    )
