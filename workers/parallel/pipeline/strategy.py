"""Stages over a state that every rank holds: what is shared out is the computation, and with it the
memory of activations. A lost rank takes nothing along, so that whoever survives cuts the blocks
anew and goes on.

Of the axes of the state, then, a pipeline is none: who saves, copies or evaluates sees "ddp".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from elastic.protocol.errors import PeerLost, StepCancelled, WrongInput
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages.to_controller import Planned, Stage
from elastic.protocol.pipeline import PipelinePlan, plan_pipeline
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import AnyGroup
from workers.parallel.ddp import Replicated, build_replica
from workers.parallel.pipeline.chain import Chain, find_chain
from workers.parallel.pipeline.neighbours import Neighbours
from workers.parallel.pipeline.passes import StagePasses
from workers.parallel.pipeline.reducer import HolderGroups, PipelineReducer
from workers.parallel.pipeline.schedule import check_schedule
from workers.parallel.pipeline.stage import StageModel
from workers.parallel.strategy import Entered, Formed
from workers.reduction.reducers import Reducer
from workers.step.passes import NoPasses, Passes
from workers.step.randomness import seed_block
from workers.train_state.train_state import TrainState


@dataclass(frozen=True, slots=True)
class StagedMesh(Mesh):
    """The ranks of a generation, each at its position in a plan."""

    plan: PipelinePlan | None = None

    @property
    def num_active(self) -> int:
        """All ranks hold the whole state, and evaluate: none stands by."""
        return self.world_size

    def load(self, num_microbatches: int, rank: int) -> float:
        assert self.plan is not None
        costs, blocks = self.plan.costs, self.plan.blocks(self.position(rank))
        share = sum(costs[blocks.start : blocks.stop]) / sum(costs)
        return share * len(self.ids(num_microbatches, rank))

    def ids(self, num_microbatches: int, rank: int) -> range:
        assert self.plan is not None
        return self.plan.ids(self.position(rank))

    def num_passes(self, num_microbatches: int, rank: int) -> int:
        return len(self.ids(num_microbatches, rank))


class Staged(Replicated):
    """See `workers.parallel.strategy.Strategy`."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        build_again: Callable[[], TrainState],
        workload: Any,
        depth: int,
    ) -> None:
        """depth: of a pipeline, as it is wanted."""
        super().__init__(spec, train_state, build_again)
        self._workload, self._depth = workload, depth
        self.chain: Chain | None = None
        self._axes = replace(spec.parallel, pp=1, schedule="")
        self._mesh = StagedMesh(self._axes, 1)
        self._formed: Formed | None = None
        self._groups: HolderGroups | None = None

    def examine(self, compute: Callable[[], Any]) -> None:
        try:
            self.chain = find_chain(self.train_state.model, self._workload, compute)
        except WrongInput as error:
            raise WrongInput(f"pp:{self._depth}: {error}") from error
        trained = self.train_state.parameters
        many = [n for n, used in self.chain.shared.items() if len(used) > 2 and n in trained]
        if many:
            count = len(self.chain.shared[many[0]])
            raise WrongInput(
                f"pp:{self._depth}: {many[0]} is shared by {count} blocks, and stages can share a "
                "parameter by two: give each its own, or use parallel='ddp'"
            )

    def enter(self, formed: Formed) -> Entered:
        """Cut the blocks for these members. Raises PeerLost."""
        entered = super().enter(formed)
        group = formed.group
        mine = None if self.chain is None else [self.chain.names, self.chain.costs]
        said = gather_json(group, mine)
        if self.chain is None:
            raise WrongInput(
                "the blocks of a pipeline are found with the workload's loss() on a micro-batch, "
                "which this worker could not compute"
            )
        names, costs = next(of_rank for of_rank in said if of_rank is not None)
        assert tuple(names) == self.chain.names, (names, self.chain.names)
        plan = plan_pipeline(self._depth, group.size(), costs, self._spec.num_microbatches)
        self._mesh = StagedMesh(self._axes, group.size(), formed.order, plan)
        self._formed = formed
        if group.rank() == 0:
            formed.say(self._planned(formed.generation))
        self._groups = HolderGroups(group, self._spec.join_timeout_s)
        return entered

    def _planned(self, generation: int) -> Planned:
        plan, stages = self.plan, list[Stage | None]()
        for rank in range(self._mesh.world_size):
            seat = plan.seat(self._mesh.position(rank))
            if seat is None:
                stages.append(None)
                continue
            blocks = plan.pipelines[seat.pipeline].blocks(seat.stage)
            stages.append(Stage(seat.pipeline, seat.stage, (blocks.start, blocks.stop)))
        warnings = tuple(plan.warnings(self._depth))
        return Planned(generation, str(plan), warnings, tuple(stages))

    def mesh_of(self, world_size: int) -> Mesh:
        is_it = self._mesh.plan is not None and world_size == self._mesh.world_size
        return self._mesh if is_it else Mesh(self._axes, world_size)

    @property
    def plan(self) -> PipelinePlan:
        """Of the generation at hand."""
        assert self._mesh.plan is not None
        return self._mesh.plan

    # --- a step -----------------------------------------------------------------------------
    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> Reducer:
        assert self.chain is not None
        assert self._groups is not None
        return PipelineReducer(
            parameters,
            self.train_state.buffers,
            self._groups,
            self.chain,
            self.plan,
            ranks=mesh.ranks(),
            num_microbatches=self._spec.num_microbatches,
        )

    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Reducer) -> Passes:
        plan, formed, chain = self.plan, self._formed, self.chain
        assert formed is not None
        assert chain is not None
        position = mesh.position(group.rank())
        seat = plan.seat(position)
        if seat is None:
            return NoPasses()  # it stands by
        first, stages = position - seat.stage, plan.pipelines[seat.pipeline]

        def on_lost(error: PeerLost) -> NoReturn:
            formed.say_lost(error)
            raise StepCancelled from error

        ranks = mesh.ranks()[first : first + stages.depth]
        model, seed = self.train_state.model, self._spec.seed
        return StagePasses(
            StageModel(model, chain, stages.blocks(seat.stage)),
            chain,
            stages,
            seat.stage,
            Neighbours(group, ranks, on_lost, formed.gathering),
            parameters=self.train_state.parameters,
            buffers=self.train_state.buffers,
            reducer=reducer,
            schedule=self._spec.parallel.schedule,
            seed_block=lambda step, microbatch_id, block: seed_block(
                seed, step, microbatch_id, block
            ),
        )


def build_staged(workload: Any, spec: WorkerSpec, device: torch.device, depth: int) -> Staged:
    """The state at step 0, whole. depth: wanted stages of a pipeline. Raises WrongInput."""
    check_schedule(spec.parallel.schedule)

    def build() -> TrainState:
        return build_replica(workload, spec, device)

    return Staged(spec, build(), build, workload, depth)
