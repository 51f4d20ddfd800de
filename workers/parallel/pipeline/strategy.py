"""A model in stages: each rank has the state of its blocks, and computes these. Whoever survives a
loss cuts the blocks anew, and gets what it lacks from those who have it.

How a worker gets its part is workers/parallel/shards.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost, WrongInput
from elastic.protocol.layout import BlockSets
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages.to_controller import Planned, Stage
from elastic.protocol.messages.to_worker import Sync
from elastic.protocol.pipeline import PipelinePlan, Seat, Stages, plan_pipeline
from elastic.protocol.rank_order import Holding, order_ranks
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup
from workers.data.loader import AnyLoader
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import AnyGroup
from workers.parallel.ahead import PartAhead, Sources
from workers.parallel.fsdp2_private.shard_step import ELEMENTWISE
from workers.parallel.initial import Initial, settle_small
from workers.parallel.over_shards import OverShards, when_lost
from workers.parallel.pipeline.block_groups import BlockGroups
from workers.parallel.pipeline.chain import Chain, find_chain
from workers.parallel.pipeline.forwards import NoForwards, StageForwards
from workers.parallel.pipeline.links import Links, links_of
from workers.parallel.pipeline.neighbours import Neighbours
from workers.parallel.pipeline.parts import StageParts
from workers.parallel.pipeline.passes import StagePasses
from workers.parallel.pipeline.readers import find_readers
from workers.parallel.pipeline.reducer import PipelineReducer
from workers.parallel.pipeline.remembered import Looks
from workers.parallel.pipeline.rows import SharedRows
from workers.parallel.pipeline.stage import StageModel
from workers.parallel.pipeline.stand_in import Announced, StandIns, Structure, places_without
from workers.parallel.shards import Shards
from workers.parallel.strategy import Entered, Formed, NoPasses, Passes
from workers.reduction.norm import squares_of_shards
from workers.reduction.reducers import Reduced, Reducer
from workers.step.forwards import Forwards
from workers.step.precision import DTYPES, Casting
from workers.torch_private.modules import is_compiled
from workers.torch_private.version import check_version
from workers.train_state.build import build_model, build_state, equip_blocks
from workers.train_state.train_state import TrainState


@dataclass(frozen=True, slots=True)
class StagedMesh(Mesh):
    """The ranks of a generation, each at its position in a plan."""

    plan: PipelinePlan | None = None

    def load(self, num_microbatches: int, rank: int) -> float:
        assert self.plan is not None
        costs, blocks = self.plan.costs, self.plan.blocks(self.position(rank))
        share = sum(costs[block] for block in blocks) / sum(costs)
        return share * len(self.ids(num_microbatches, rank))

    def ids(self, num_microbatches: int, rank: int) -> range:
        assert self.plan is not None
        return self.plan.ids(self.position(rank))

    def num_passes(self, num_microbatches: int, rank: int) -> int:
        assert self.plan is not None
        return len(self.ids(num_microbatches, rank)) * len(self.plan.stages(self.position(rank)))


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's in a pipeline."""

    seat: Seat
    pipeline: Stages
    models: dict[int, StageModel]
    """By stage, those that it has."""
    neighbours: Neighbours


class Staged(OverShards):
    """See `workers.parallel.strategy.Strategy`."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        parts: StageParts,
        shards: Shards,
        backup: Backup,
        *,
        workload: Any,
        depth: int,
    ) -> None:
        """depth: of a pipeline, as it is wanted. Raises WrongInput."""
        check_version("a pipeline")
        super().__init__(spec, train_state, parts, shards, backup)
        self._parts, self._workload, self._depth = parts, workload, depth
        self.chain: Chain | None = None
        self._on_lost: Callable[[PeerLost], NoReturn] | None = None
        self._groups: BlockGroups | None = None
        self._links: Links | None = None
        self._structure: Structure | None = None
        """Of a micro-batch; None: ranks load what they take nothing from, too."""
        self._told: Structure | None = None
        """Likewise, of the generation at hand."""
        self._rows: SharedRows | None = None
        self.ahead = PartAhead(
            train_state,
            parts.layout,
            self._sources,
            is_live=lambda: shards.is_live,
            take=shards.take_ahead,
            claim=shards.claim,
        )

    # --- a generation begins --------------------------------------------------------------
    def examine(
        self, loss: Callable[[Any], Any], batch: Callable[[], Any], *, is_seen: bool = True
    ) -> None:
        self._refuse_compiled()
        if self.chain is not None:
            return
        model, device = self.train_state.model, self._parts.device
        compute = lambda: loss(batch())  # noqa: E731
        try:
            chain = find_chain(model, self._workload, compute, device=device)
        except WrongInput as error:
            raise WrongInput(f"pp:{self._depth}: {error}") from error
        self._structure = None if is_seen else Structure.of(batch())
        if self._structure is not None:
            chain = replace(chain, readers=find_readers(model, chain, loss, batch(), device))
        self._take_chain(chain)
        trained = self.train_state.parameters
        shared = self._known_chain.shared
        many = [n for n, used in shared.items() if len(used) > 2 and n in trained]
        if many:
            count = len(shared[many[0]])
            raise WrongInput(
                f"pp:{self._depth}: {many[0]} is shared by {count} blocks, and stages can share a "
                "parameter by two: give each its own, or use parallel='ddp'"
            )

    def _refuse_compiled(self) -> None:
        """The user may compile the model when it is built, or before the first step."""
        if any(is_compiled(m) for m in self.train_state.model.modules()):
            raise WrongInput(
                f"pp:{self._depth}: compile() makes one program of blocks that are on several "
                "stages; leave it out, or use parallel='fsdp'"
            )

    def enter(self, formed: Formed) -> Entered:
        """Cut the blocks for these members; each gets what it lacks of the newest state of at most
        `formed.step` steps that is whole."""
        group, parallel = formed.group, self._spec.parallel
        self.reset()
        self.shards.note_steps()
        plan = self._plan_together(group)
        ranks = self._holdings(group)
        order = order_ranks(plan, ranks, self._sizes(), formed.order)
        mesh = self.mesh = StagedMesh(parallel, group.size(), order, plan.cuts, plan)
        entered = self.take_part(formed, self.claims(formed))
        self._on_lost = when_lost(formed)
        if group.rank() == 0:
            formed.say(self._planned(mesh, formed.generation))
        timeout_s = self._spec.timeouts.join_s
        links = links_of(plan, self._known_chain, mesh.ranks())
        self._links = Links(group, links, timeout_s)
        self._groups = BlockGroups(group, timeout_s)
        if parallel.cuts_tensors:
            self._rows = SharedRows(
                self._parts, mesh, self._groups, self._on_lost, formed.gathering
            )
        return replace(entered, doubled=self._doubled([of_rank.node for of_rank in ranks]))

    def _sources(self, sync: Sync) -> Sources | None:
        """Whose blocks this worker, a newcomer, copies ahead."""
        chain, parallel = self.chain, self._spec.parallel
        if chain is None or parallel.cuts_tensors or not sync.stages:
            return None  # where rows are shared a newcomer changes everybody's
        count, schedule, size = self._spec.num_microbatches, parallel.schedule, len(sync.next_ranks)
        plan = plan_pipeline(self._depth, size, chain.costs, count, schedule)
        now = holdings_of(sync.stages)
        ranks = [
            replace(now[rank] if rank >= 0 else Holding(), node=node)
            for rank, node in zip(sync.next_ranks, sync.next_nodes, strict=True)
        ]
        order = order_ranks(plan, ranks, self._sizes(), sync.next_order)
        then = Mesh(parallel, size, order, plan.cuts)
        mine, found = set(then.blocks(sync.rank)), dict[int, list[tuple[int, ...]]]()
        for blocks in sorted(set(chain.uses.values())):
            if mine.isdisjoint(blocks):
                continue
            givers = [r for r, has in enumerate(now) if not set(blocks).isdisjoint(has.blocks)]
            chosen = next((r for r in givers if r in found), givers[sync.rank % len(givers)])
            found.setdefault(chosen, []).append(blocks)
        if not found:
            return None
        return Sources(then, sync.rank, {rank: tuple(of) for rank, of in found.items()})

    def _sizes(self) -> dict[tuple[int, ...], int]:
        """Bytes of the parameters that the same blocks need; the optimizer's state is as much again
        for each, or twice as much."""
        found: dict[tuple[int, ...], int] = {}
        for name, blocks in sorted(self._known_chain.uses.items()):
            whole = self._parts.whole[name]
            found[blocks] = found.get(blocks, 0) + (whole.nbytes if whole.dim() else 0)
        return found

    def _holdings(self, group: AnyGroup) -> list[Holding]:
        """What each rank has, by rank. A collective."""
        at, blocks, position = self.shards.at_hand, list[int](), 0
        if at is not None:
            blocks = [b for b in at.mesh.blocks(at.rank) if (b,) not in at.lacks]
            position = at.mesh.position(at.rank)
        said = gather_json(group, [self._spec.node, blocks, position, self.held_step])
        return [Holding(node, tuple(held), *where) for node, held, *where in said]

    def _doubled(self, of_ranks: Sequence[str]) -> BlockSets:
        """The blocks of tensors that live on two nodes. of_ranks: their nodes."""
        if self._spec.parallel.cuts_tensors:
            return ()  # each row is one rank's
        nodes: dict[int, set[str]] = {}
        for rank, node in enumerate(of_ranks):
            for block in self.mesh.blocks(rank):
                nodes.setdefault(block, set()).add(node)
        used = sorted(set(self._known_chain.uses.values()))
        return tuple(
            blocks for blocks in used if len(set[str]().union(*(nodes[b] for b in blocks))) > 1
        )

    def _plan_together(self, group: AnyGroup) -> PipelinePlan:
        mine = None
        if self.chain is not None:
            mine = [self.chain.names, self.chain.costs, self.chain.readers, str(self._structure)]
        said = gather_json(group, mine)
        if None in said:
            self._share_chain(group, said)
        names, costs, *batches = next(of_rank for of_rank in said if of_rank is not None)
        assert tuple(names) == self._known_chain.names, (names, self._known_chain.names)
        is_agreed = all(of_rank is not None and of_rank[2:] == batches for of_rank in said)
        self._told = self._structure if is_agreed else None
        schedule, count = self._spec.parallel.schedule, self._spec.num_microbatches
        return plan_pipeline(self._depth, group.size(), costs, count, schedule)

    def _share_chain(self, group: AnyGroup, said: list[Any]) -> None:
        """Give the chain to those that could not compute a micro-batch, as where the whole model
        did not fit into their memory. A collective. said: None by each of these ranks."""
        knows = next((rank for rank, of_rank in enumerate(said) if of_rank is not None), None)
        if knows is None:
            raise WrongInput(
                "the blocks of a pipeline are found with the workload's loss() on a micro-batch, "
                "which no worker could compute"
            )
        given = self._known_chain.to_json() if group.rank() == knows else None
        found = gather_json(group, given)[knows]
        if self.chain is None:
            self._take_chain(Chain.from_json(found))

    def _take_chain(self, chain: Chain) -> None:
        self.chain, self._parts.uses = chain, chain.uses

    @property
    def _known_chain(self) -> Chain:
        assert self.chain is not None
        return self.chain

    def _planned(self, mesh: StagedMesh, generation: int) -> Planned:
        plan, stages = self.plan, list[Stage | None]()
        for rank in range(mesh.world_size):
            position = mesh.position(rank)
            seat = plan.seat(position)
            if seat is None:
                stages.append(None)
                continue
            borders = tuple(b for r in plan.stages(position) for b in (r.start, r.stop))
            stages.append(Stage(seat.pipeline, seat.stage, borders))
        warnings = tuple(plan.warnings(self._depth, self._spec.parallel.schedule))
        moved = self.shards.moved_bytes
        layout = f"{plan}; {moved / 1e6:.1f} MB moved" if moved else str(plan)
        return Planned(
            generation=generation,
            layout=layout,
            warnings=warnings,
            stages=tuple(stages),
            moved_bytes=moved,
            blocks=self._known_chain.names,
            costs=plan.costs,
        )

    @property
    def plan(self) -> PipelinePlan:
        """Of the generation at hand."""
        assert isinstance(self.mesh, StagedMesh)
        assert self.mesh.plan is not None
        return self.mesh.plan

    # --- a step -----------------------------------------------------------------------------
    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> PipelineReducer:
        assert self._groups is not None
        return PipelineReducer(
            parameters,
            self.train_state.buffers,
            self._groups,
            self._known_chain,
            self.plan,
            ranks=mesh.ranks(),
            num_microbatches=self._spec.num_microbatches,
            links=self._links,
            rows=self._rows,
        )

    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Reducer) -> Passes:
        place = self._place(mesh, group)
        if place is None:
            return NoPasses()  # it is inactive
        assert isinstance(reducer, PipelineReducer)
        place.neighbours.source = partial(self._source, place)
        return StagePasses(
            place.models,
            self._known_chain,
            place.pipeline,
            place.neighbours,
            parameters=self.train_state.parameters,
            buffers=self.train_state.buffers,
            reducer=reducer,
            has_halves=not self._spec.activation_checkpointing,
            sum_dtype=self.train_state.casting.dtype_of,
        )

    def _source(self, place: _Place, loader: AnyLoader) -> AnyLoader:
        """What a rank's micro-batches come from; loader: the worker's own."""
        structure, readers = self._told, self._known_chain.readers
        without = [] if readers is None else places_without(place.pipeline, readers)
        if structure is None or not without:
            return loader
        at, neighbours = place.seat.stage, place.neighbours
        if at in without:
            return StandIns(loader, structure, neighbours.hear)
        if at == 0:
            tell = lambda numbers, i: neighbours.announce(numbers, without, i)  # noqa: E731
            return Announced(loader, structure, tell)
        return loader

    def forwards(self, mesh: Mesh, group: AnyGroup) -> Forwards:
        place = self._place(mesh, group)
        if self._rows is not None:
            self._rows.gather()
        if place is None:
            return NoForwards()  # it is inactive
        return StageForwards(
            place.models,
            place.neighbours,
            pipeline=place.seat.pipeline,
            num_pipelines=len(self.plan.pipelines),
        )

    def _place(self, mesh: Mesh, group: AnyGroup) -> "_Place | None":
        """This rank's in the generation at hand; None if it is inactive."""
        plan, chain, on_lost, links = self.plan, self._known_chain, self._on_lost, self._links
        assert on_lost is not None
        assert links is not None
        self._refuse_compiled()
        position = mesh.position(group.rank())
        seat = plan.seat(position)
        if seat is None:
            return None
        first, pipeline = position - seat.stage, plan.pipelines[seat.pipeline]
        ranks = mesh.ranks()[first : first + pipeline.depth]
        of_stages = [ranks[pipeline.place_of(stage)] for stage in range(pipeline.num_stages)]
        model, whole, looks = self.train_state.model, self._parts.whole, Looks()
        models = {
            stage: StageModel(model, chain, pipeline.blocks(stage), whole, looks)
            for stage in pipeline.stages_at(seat.stage)
        }
        neighbours = Neighbours(links, of_stages, on_lost, self._gathering)
        return _Place(seat, pipeline, models, neighbours)

    def before_vote(self, reduced: Reduced, read: Callable[[Tensor], Tensor]) -> Reduced:
        if self.train_state.clip_norm is None:
            return reduced
        assert self._groups is not None
        mine = [(self.layout(f"model/{n}", g), g) for n, g in reduced.gradients.items()]
        group, device = self._groups.group, self._parts.device
        squares = squares_of_shards(mine, self.mesh, group, read, device)
        return replace(reduced, squares=dict(zip(reduced.gradients, squares, strict=True)))

    def reset(self) -> None:
        if self._rows is not None:
            self._rows.release()


def holdings_of(stages: Sequence[Stage | None]) -> list[Holding]:
    """Of the members of a generation, by rank, who have said their places."""
    seats = sorted((s.pipeline, s.stage) for s in stages if s is not None)
    positions = {seat: position for position, seat in enumerate(seats)}
    found: list[Holding] = []
    for stage in stages:
        if stage is None:
            found.append(Holding())
            continue
        borders = zip(stage.blocks[::2], stage.blocks[1::2], strict=True)
        blocks = tuple(block for first, end in borders for block in range(first, end))
        found.append(Holding("", blocks, positions[stage.pipeline, stage.stage]))
    return found


def build_staged(
    workload: Any, spec: WorkerSpec, device: torch.device, backup: Backup, depth: int
) -> Staged:
    """The state at step 0, whole until the first generation. depth: wanted stages of a pipeline.
    Raises WrongInput."""
    model = build_model(workload, spec)
    if hasattr(workload, "init_weights"):
        settle_small(model, device)
    else:
        model = model.to(device)
    casting = Casting(model, DTYPES[spec.precision])
    equip_blocks(model, spec, lambda: casting.is_applied)
    train_state = build_state(model, workload, spec, casting)
    check_by_itself(train_state.optimizer, spec)
    parts = StageParts(model, device, shares_rows=spec.parallel.cuts_tensors)
    initialise = getattr(workload, "init_weights", None)
    initial = Initial(train_state, lambda: build_model(workload, spec), initialise, spec.seed)
    shards = Shards(spec, train_state, parts, initial, backup)
    return Staged(spec, train_state, parts, shards, backup, workload=workload, depth=depth)


def check_by_itself(optimizer: torch.optim.Optimizer, spec: WorkerSpec) -> None:
    """WrongInput for an optimizer whose step on a stage's parameters would not be that on all."""
    kind, known = type(optimizer), ELEMENTWISE
    if not spec.parallel.cuts_tensors:
        known = (*known, torch.optim.Muon)
    if optimizer.state:
        raise WrongInput(
            f"{kind.__name__} makes its state before the first step, which stages cannot share; "
            f"use one of {', '.join(o.__name__ for o in known)}"
        )
    if kind not in known:
        raise WrongInput(
            f"{kind.__name__} is not known to take its step of each parameter by itself, which "
            f"parallel='{spec.parallel}' needs; use one of {', '.join(o.__name__ for o in known)}, "
            "or parallel='ddp'"
        )
