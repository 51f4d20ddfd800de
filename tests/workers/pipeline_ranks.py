"""Ranks that train a case of pipeline_models.py in stages, without a session around them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from elastic.protocol.pipeline import PipelinePlan, Stages, plan_pipeline
from elastic.protocol.schedule import stages_per_rank
from tests.workers import where
from tests.workers.pipeline_models import Case
from tests.workers.ranks import DEADLINE_S
from workers.data.placement import to_device
from workers.parallel.pipeline.block_groups import BlockGroups
from workers.parallel.pipeline.chain import Chain, find_chain
from workers.parallel.pipeline.links import Links
from workers.parallel.pipeline.neighbours import Neighbours
from workers.parallel.pipeline.passes import StagePasses
from workers.parallel.pipeline.reducer import PipelineReducer
from workers.parallel.pipeline.remembered import Looks
from workers.parallel.pipeline.stage import StageModel
from workers.reduction.reducers import Reduced
from workers.step.precision import Casting, cast_inputs
from workers.step.randomness import seed_microbatch
from workers.train_state.blocks import blocks_of
from workers.train_state.train_state import TrackedBuffers


def groups_in(group: Any) -> BlockGroups:
    return BlockGroups(group, DEADLINE_S)


def raise_it(error: Exception) -> Any:
    raise error


class Trained:
    """A model, and its steps by SGD in stages."""

    def __init__(self, case: Case, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, case.build().to(where.HERE)
        self.casting = Casting(self.model, dtype)
        if dtype is not None:
            is_half = lambda: self.casting.is_applied  # noqa: E731
            cast_inputs(self.model, blocks_of(self.model), dtype, is_half)
        self.batches = to_device(case.batches(), where.HERE)
        self.chain: Chain = find_chain(
            self.model, None, lambda: case.loss(self.model, self.batches[0])
        )
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.buffers = TrackedBuffers(self.model)
        self.step = 0

    def plan(self, wanted_depth: int, num_ranks: int, schedule: str = "") -> PipelinePlan:
        """Of 0: a pipeline of three and one of two, which have one micro-batch and the others."""
        each = stages_per_rank(schedule)
        if not wanted_depth:
            costs, count = self.chain.costs, len(self.batches)
            three = (*range(3 * each), len(costs))
            two = (*range(0, 4 * each, 2)[: 2 * each], len(costs))
            sides = (
                Stages(three, range(1), 1, schedule),
                Stages(two, range(1, count), 1, schedule),
            )
            return PipelinePlan(num_ranks, costs, sides)
        return plan_pipeline(wanted_depth, num_ranks, self.chain.costs, len(self.batches), schedule)

    def train(
        self,
        groups: BlockGroups,
        wanted_depth: int,
        num_steps: int,
        schedule: str = "",
        ranks: Sequence[int] = (),
    ) -> list[float]:
        """The loss of each micro-batch of the last step that this rank has; nan if it has none.
        ranks: by position."""
        group = groups.group
        plan = self.plan(wanted_depth, group.size(), schedule)
        ranks = list(ranks) or list(range(group.size()))
        self.reducer = PipelineReducer(
            self.parameters, self.buffers, groups, self.chain, plan, ranks=ranks,
            num_microbatches=len(self.batches),
        )  # fmt: skip
        position = ranks.index(group.rank())
        seat, losses = plan.seat(position), [float("nan")] * len(self.batches)
        passes = None
        if seat is not None:
            stages = plan.pipelines[seat.pipeline]
            first = position - seat.stage
            in_order = [ranks[first + stages.place_of(s)] for s in range(stages.num_stages)]
            looks = Looks()
            models = {
                s: StageModel(self.model, self.chain, stages.blocks(s), looks=looks)
                for s in stages.stages_at(seat.stage)
            }
            self.neighbours = Neighbours(Links(group), in_order, raise_it, nullcontext)
            passes = self.passes = StagePasses(
                models, self.chain, stages, self.neighbours,
                parameters=self.parameters, buffers=self.buffers, reducer=self.reducer,
            )  # fmt: skip
        for _ in range(num_steps):
            self.reducer.begin()
            self.buffers.begin_step()
            self.casting.cast()
            if passes is not None:
                passes.begin(self.step)
                order = passes.order(plan.ids(position))
                for number, i in enumerate(order, 1):
                    losses[i] = self._pass(passes, i, len(order) - number)
            self.casting.restore()
            self._apply(self.reducer.finish())
        self._share(group, plan, ranks)
        return losses

    def _share(self, group: Any, plan: PipelinePlan, ranks: list[int]) -> None:
        """Here every rank has memory for all: what the others' blocks have become."""
        for name, parameter in self.parameters.items() if group.size() > 1 else ():
            options = BroadcastOptions()
            options.rootRank = ranks[plan.positions_with(min(self.chain.uses[name]))[0]]
            plain = parameter.detach().contiguous()
            group.broadcast([plain], options).wait()
            parameter.data.copy_(plain)

    def _pass(self, passes: StagePasses, i: int, num_left: int) -> float:
        self.buffers.begin_microbatch()
        seed_microbatch(7, 0, i)
        passes.before_forward(i)
        returned = self.case.loss(self.model, self.batches[i])
        loss = passes.loss_of(returned)
        total = None if loss is None else loss[0]
        passes.backward(i, total, num_left)
        return float("nan") if total is None else float(total.detach())

    def _apply(self, reduced: Reduced) -> None:
        with torch.no_grad():
            for name, gradient in reduced.gradients.items():
                if gradient.shape == self.parameters[name].shape:  # else it is another stage's
                    self.parameters[name] -= 0.05 * gradient
        self.buffers.commit(reduced.buffers, self.buffers.integers, len(self.batches))
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t.detach().clone() for name, t in named}


def plain(case: Case, num_steps: int) -> Trained:
    """The same steps by whole micro-batches and no stages at all."""
    from workers.distributed.process_group import Alone
    from workers.reduction.bitwise import BitwiseReducer

    trained = Trained(case)
    count = len(trained.batches)
    reducer = BitwiseReducer(
        trained.parameters, trained.buffers.floating, Alone(), range(count), count
    )
    for _ in range(num_steps):
        reducer.begin()
        trained.buffers.begin_step()
        for i in range(count):
            trained.buffers.begin_microbatch()
            seed_microbatch(7, 0, i)
            returned = case.loss(trained.model, trained.batches[i])
            total = returned[0] if isinstance(returned, tuple) else returned
            reducer.before_backward(i == count - 1)
            total.backward()
            reducer.after_backward(i, trained.buffers.end_microbatch())
        trained._apply(reducer.finish())
    return trained
