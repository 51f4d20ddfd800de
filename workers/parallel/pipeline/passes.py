"""A step's passes on a rank of a pipeline: the user's loop asks for one micro-batch after another,
once for each of the rank's stages. What the schedule has in between, backwards of earlier ones and
what neighbours send, is done when the loop gives back a loss.

What a stage computes of a forward is stage.py's, the order schedule.py's.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from elastic.protocol.pipeline import Stages
from workers.data.loader import AnyLoader
from workers.parallel.pipeline.absent import Absent
from workers.parallel.pipeline.backward import StageBackward
from workers.parallel.pipeline.chain import Chain
from workers.parallel.pipeline.neighbours import Arriving, Neighbours
from workers.parallel.pipeline.reducer import PipelineReducer
from workers.parallel.pipeline.schedule import Action, actions
from workers.parallel.pipeline.stage import Crossing, StageModel
from workers.step.vote import Loss, check_loss
from workers.train_state.train_state import TrackedBuffers


class StagePasses:
    """See `workers.parallel.strategy.Passes`. Of one rank, for a generation."""

    def __init__(
        self,
        models: Mapping[int, StageModel],
        chain: Chain,
        stages: Stages,
        neighbours: Neighbours,
        *,
        parameters: Mapping[str, nn.Parameter],
        buffers: TrackedBuffers,
        reducer: PipelineReducer,
        has_halves: bool = True,
        sum_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    ) -> None:
        """models: by stage, those of this rank. parameters: all that are trained. has_halves: a
        backward may be computed in two, where the schedule has it so. sum_dtype: see
        `Casting.dtype_of`."""
        self._sum_dtype = sum_dtype
        self._begin = partial(
            StageBackward, parameters=list(parameters.values()), has_halves=has_halves
        )
        self._mine, self._stages = tuple(models.items()), stages
        self._neighbours = neighbours
        self._buffers, self._reducer = buffers, reducer
        place = stages.place_of(self._mine[0][0])
        self._order = actions(stages.schedule, stages.depth, place, len(stages.ids))
        self._todo: deque[Action] = deque()
        self._at = next(a for a in reversed(self._order) if a.kind == "forward")
        """Whose forward runs now, or has run last."""
        self._flight: dict[tuple[int, int], _InFlight] = {}
        """By micro-batch and stage."""
        self.in_backward = -1
        self.most_in_flight = 0
        """Micro-batches that have waited for their backward at a time, of all steps."""
        self._shared = {
            parameters[name]: sorted({stages.stage_of(block) for block in used})
            for name, used in chain.shared.items()
            if name in parameters
        }
        self._shared = {p: users for p, users in self._shared.items() if len(users) > 1}
        self._summed: dict[tuple[int, int], Tensor] = {}
        """By shared parameter and micro-batch what another stage of this rank has."""

    def loader(self, loader: AnyLoader) -> AnyLoader:
        return self._neighbours.source(loader)

    def begin(self, step: int) -> None:
        self._todo, self._flight, self._summed = deque(self._order), {}, {}
        self._neighbours.begin()
        for _, model in self._mine:
            model.begin_step()

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        return [self._stages.ids[a.index] for a in self._order if a.kind == "forward"]

    def before_forward(self, microbatch_id: int) -> None:
        action = self._at = self._todo.popleft()
        assert (action.kind, self._stages.ids[action.index]) == ("forward", microbatch_id)
        stage, model = self._mine[action.turn]
        before, after = stage - 1, stage + 1
        self._buffers.separate()

        def receive(like: Sequence[Tensor]) -> list[Tensor]:
            return self._neighbours.receive(like, before, "activation", microbatch_id).wait()

        def send(tensors: Sequence[Tensor]) -> None:
            self._neighbours.send(tensors, after, "activation", microbatch_id)

        model.begin(receive, send)

    @property
    def has_loss(self) -> bool:
        _, model = self._mine[self._at.turn]
        return model.is_last

    def loss_of(self, returned: Any) -> Loss | None:
        _, model = self._mine[self._at.turn]
        if not model.is_last:
            return None
        total = returned[0] if isinstance(returned, tuple) and returned else returned
        if isinstance(total, Absent):
            model.check_blocks()
            raise WrongInput(
                "loss() depends on what another stage computes otherwise than by what the last "
                "block takes; a penalty on weights belongs into the optimizer (weight_decay)"
            )
        return check_loss(returned)

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        stage, model = self._mine[self._at.turn]
        crossing = model.end()
        flight = _InFlight(crossing, loss, self._buffers.end_microbatch())
        if len(self._mine) > 1:
            self._buffers.join_integers(self._at.index, model.buffers)
        if not model.is_last:
            flight.gradients = self._neighbours.receive(
                crossing.sent_with_gradient, stage + 1, "gradient", microbatch_id
            )
        self._flight[microbatch_id, stage] = flight
        self.most_in_flight = max(self.most_in_flight, len(self._flight))
        while self._todo and self._todo[0].kind != "forward":
            self._backward(self._todo.popleft())
        if not self._todo:
            self._neighbours.settle()

    def _backward(self, action: Action) -> None:
        """All of it, or a half."""
        of, (stage, model) = self._stages.ids[action.index], self._mine[action.turn]
        held, self.in_backward = self._flight[of, stage], of
        if action.kind == "weights":
            assert held.backward is not None
            self._reducer.before_backward(not self._todo)
            held.backward.weights()
        else:
            held.backward = self._begin_backward(held)
            if action.kind == "inputs":
                held.backward.inputs()
            else:
                self._reducer.before_backward(not self._todo)
                if held.backward.adds_once:
                    self._reducer.lend(model.blocks)
                held.backward.whole()
            if stage > 0:
                received = held.crossing.received
                back = [torch.zeros_like(t) if t.grad is None else t.grad for t in received]
                self._neighbours.send(back, stage - 1, "gradient", of)
        if action.kind != "inputs":
            self._add_shared(of, stage)
            self._reducer.after_backward_of(model.blocks, of, held.buffers)
            del self._flight[of, stage]

    def _begin_backward(self, held: "_InFlight") -> StageBackward:
        """Once its gradients have come from the stage behind."""
        results, gradients = [held.loss] if held.loss is not None else [], None
        if held.gradients is not None:
            sent, given = held.crossing.sent_with_gradient, held.gradients.wait()
            pairs = [(t, g) for t, g in zip(sent, given, strict=True) if t.requires_grad]
            results, gradients = [t for t, _ in pairs], [g for _, g in pairs]
        return self._begin(results, gradients, held.crossing.received)

    def _add_shared(self, microbatch_id: int, stage: int) -> None:
        """The first stage that uses a parameter has the sum of what all of them have: of two, that
        is what one backward through both gives."""
        mine = dict(self._mine)
        for index, (parameter, users) in enumerate(self._shared.items()):
            first, *others = users
            if stage == first:
                total = parameter.grad
                for user in reversed(others):
                    if user in mine:
                        found = self._summed.pop((index, microbatch_id))
                    else:
                        found = self._neighbours.receive_shared(
                            parameter, user, index, microbatch_id
                        )
                    total = found if total is None else self._sum(parameter, total, found)
                parameter.grad = total
            elif stage in others:
                gradient = parameter.grad
                own = torch.zeros_like(parameter) if gradient is None else gradient
                if first in mine:
                    self._summed[index, microbatch_id] = own
                else:
                    self._neighbours.send_shared(own, first, index, microbatch_id)
                parameter.grad = None

    def _sum(self, parameter: nn.Parameter, one: Tensor, other: Tensor) -> Tensor:
        """As one backward adds them up: of a cast parameter, in half precision."""
        dtype = self._sum_dtype(parameter)
        return (one.to(dtype) + other.to(dtype)).to(parameter.dtype)

    def reset(self) -> None:
        for _, model in self._mine:
            model.give_up()
        self._flight = {}


class _InFlight:
    """A micro-batch that waits for its backward."""

    def __init__(self, crossing: Crossing, loss: Tensor | None, buffers: list[Tensor]) -> None:
        self.crossing, self.loss, self.buffers = crossing, loss, buffers
        self.gradients: Arriving | None = None
        self.backward: StageBackward | None = None
