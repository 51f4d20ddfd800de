"""A worker's sharded state ("fsdp", "fsdp-grad-op" and "hsdp:S"): what it holds, and how it gets
its shard of the next generation.

Nobody ever waits for a full copy: the members tell each other what they hold, and every one takes
its rows from the members, from a checkpoint, or from the initial weights. If rows were lost with
their holder, all find out alike (`RowsLost`), and the run goes back to a checkpoint.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.remote import patiently
from workers.backup.backup import Backup
from workers.checkpoint.load import find_newest, read_tensors
from workers.distributed.exchange import gather_json
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import AnyGroup
from workers.parallel.collectives import Collectives
from workers.parallel.fsdp import FsdpReducer
from workers.parallel.fsdp2_private.row_step import check_shardable, step_on_rows
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.fsdp_grad_op import FsdpGradOpReducer
from workers.parallel.hsdp import StandbyReducer
from workers.parallel.initial import Initial, settle_small
from workers.parallel.shards import kinds_of, pattern_of
from workers.parallel.strategy import Entered, Formed
from workers.reduction.norm import norm_of_rows, row_squares
from workers.reduction.reducers import Reducer
from workers.resharding.assemble import Offer, Regather, StateVersion, newest_whole
from workers.resharding.host_memory import RowMemory
from workers.resharding.transfer import ShardCoord
from workers.resharding.whole import whole_on_first
from workers.step.precision import DTYPES, Casting
from workers.train_state import serialization
from workers.train_state.build import build_model, build_state, equip_blocks
from workers.train_state.digest import hash_of
from workers.train_state.tensors import is_shard, like, local
from workers.train_state.train_state import TrainState, Update


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a worker has of the state after `step` committed steps (rows follow the replica's).

    kind: "nothing"; "initial", "checkpoint" or "copies" (in holders): by reference, all of it;
    "rows": those of `position` in the mesh of `world_size` ranks. origin: the generation that
    computed the step, or took it by reference.
    """

    kind: str = "nothing"
    step: int = 0
    position: int = 0
    world_size: int = 1
    origin: int = 0

    def to_json(self) -> list[Any]:
        return [self.kind, self.step, self.position, self.world_size, self.origin]


class Sharded:
    """See `workers.parallel.strategy.Strategy`."""

    is_whole = False
    has_collective_forward = True

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        model: ShardedModel,
        initial: Initial,
        initialise: Callable[[nn.Module, str], None] | None,
        backup: Backup,
    ) -> None:
        self._spec, self.train_state, self.model = spec, train_state, model
        self._initial, self._initialise, self.backup = initial, initialise, backup
        self.holding = Ownership()
        self.collectives: Collectives | None = None
        self.mesh = Mesh(spec.parallel, 1)
        """Of the generation at hand."""
        self._group: AnyGroup | None = None
        self._replicas: AnyGroup | None = None
        """Who holds the same rows; None: this rank stands by."""
        self._generation = 0
        self._gathering: Callable[[], AbstractContextManager[None]] = nullcontext
        self._live: dict[str, Tensor] = {}
        self._memory = RowMemory()
        self._distrusts_copies = False
        """They could not be read, although holders said that they had them."""
        self._is_untouched = not initial.is_deferred
        """The model still holds all initial weights of its own building."""

    @property
    def is_runnable(self) -> bool:
        """Before the first generation."""
        return self._is_untouched and self.collectives is None

    # --- what this worker holds --------------------------------------------------------
    def load(
        self,
        catalogue: Catalogue,
        recorded_step: int = 0,
        known_step: int = 0,
        begin_piece: Callable[[], None] = lambda: None,
    ) -> list[Damage]:
        """Stand for the state on record if holders have all of it, else for the newest good
        checkpoint, else for the initial state, without reading it into memory. Gives the damaged
        checkpoints; WrongInput if all are."""
        held = None
        if recorded_step and not self._distrusts_copies:
            where = self.backup.holders, self._spec.token, self._spec.parallel
            held = newest_whole(*where, recorded_step)
        step, damaged = (None, []) if held == recorded_step else find_newest(catalogue, begin_piece)
        self.holding = Ownership("initial") if step is None else Ownership("checkpoint", step)
        if held is not None and held > self.holding.step:
            self.holding = Ownership("copies", held)
        self.train_state.step = self.holding.step
        return damaged

    @property
    def held_step(self) -> int:
        """Rows, or shadows of them."""
        has_some = self.holding.kind != "nothing" or bool(self.backup.shadows)
        return self.train_state.step if has_some else -1

    def mesh_of(self, world_size: int) -> Mesh:
        return self.mesh

    def mesh_of_rows(self, rank: int, world_size: int) -> Mesh:
        """Under another rank its rows would go on record as rows that they are not."""
        held, mesh = self.holding, self.mesh
        assert held.kind == "rows", held
        assert (held.world_size, held.position) == (world_size, mesh.position(rank)), (held, rank)
        return mesh

    def forget(self) -> None:
        """Copies that could not be read, although holders said that they had them, are not trusted
        again."""
        self._distrusts_copies = self.holding.kind == "copies"
        self.holding = Ownership()
        self.backup.forget()

    # --- a generation begins --------------------------------------------------------------
    def enter(self, formed: Formed) -> Entered:
        """The newest state of at most `formed.step` steps that is whole; FSDP2 is connected."""
        group, step, pieces = formed.group, formed.step, formed.pieces

        def on_lost(error: PeerLost) -> NoReturn:
            formed.say_lost(error)
            raise StepCancelled from error

        mesh = self.mesh = Mesh(self._spec.parallel, group.size(), formed.order)
        device = self.model.device
        self._note_steps()
        shards = self._form_axes(mesh, group)  # while all are here: getting rows takes its time
        claims = [Ownership(*c) for c in gather_json(group, self.holding.to_json(), device)]
        formed.on_connected()
        pieces.begin()
        self.model.reset()
        origin, is_held = formed.generation, False
        references = [c for c in claims if c.kind in ("checkpoint", "initial") and c.step == step]
        kinds = {c.kind for c in references}
        if kinds:
            kind = "checkpoint" if "checkpoint" in kinds else "initial"
            self._take_reference(
                Ownership(kind, step), formed.catalogue, mesh, group.rank(), pieces
            )
        else:
            (step, origin), is_held = self._take_rows(claims, formed, mesh)
        self._generation, self._gathering = formed.generation, formed.gathering
        position = mesh.position(group.rank())
        self.holding = Ownership("rows", step, position, group.size(), origin)
        self._group = group
        if shards is not None:
            self.collectives = Collectives(shards, on_lost, formed.gathering)
            self.model.connect(self.collectives, shards, self._sharded_state())
        return Entered(origin, is_held)

    def _sharded_state(self) -> list[Tensor]:
        """What the optimizer keeps of the shards."""
        states = self.train_state.optimizer.state.values()
        return [v for state in states for v in state.values() if is_shard(v)]

    def _form_axes(self, mesh: Mesh, group: AnyGroup) -> AnyGroup | None:
        """The groups of the two axes; the shards' is returned, None if this rank stands by. Raises
        PeerLost."""
        self.collectives = self._replicas = None
        rank, timeout_s = group.rank(), self._spec.join_timeout_s
        if mesh.is_standby(rank):
            return None
        train_state, shard = mesh.replica(rank), mesh.shard(rank)
        shards = group.part(f"replica{train_state}", mesh.replica_of(rank), timeout_s)
        self._replicas = group.part(f"shard{shard}", mesh.holders_of(shard), timeout_s)
        return shards

    def _take_reference(
        self, held: Ownership, catalogue: Catalogue | None, mesh: Mesh, rank: int, pieces: Pieces
    ) -> None:
        """Where it breaks off, this rank stands for all of that state, as others did before."""
        try:
            if held.kind == "checkpoint":
                assert catalogue is not None
                self._take_checkpoint(catalogue, held.step, mesh, rank, pieces)
            else:
                self._take_initial(mesh, rank, pieces)
            pieces.wait_for_all()
        except PeerLost:
            self.holding, self.train_state.step = held, held.step
            raise

    def _take_initial(self, mesh: Mesh, rank: int, pieces: Pieces) -> None:
        values = self.local_parameters() if self._is_untouched else None
        self._is_untouched = False  # from here on its parameters are shards
        self._place(mesh, rank)
        self._initial.fill(
            self.train_state, self._initialise, mesh, rank, values, pieces.begin_apart
        )

    def _take_checkpoint(
        self, catalogue: Catalogue, step: int, mesh: Mesh, rank: int, pieces: Pieces
    ) -> None:
        self._is_untouched = False
        self._place(mesh, rank)
        manifest = patiently(partial(catalogue.manifest, step), pieces.rest)
        parameters = dict(self.model.model.named_parameters())
        patterns = {t.name: pattern_of(t.name, t.shape, parameters) for t in manifest.tensors}
        rows = {
            t.name: mesh.rows(t.shape[0], rank)
            for t in manifest.tensors
            if patterns[t.name] is not None
        }
        into = {name: local(t) for name, t in self.train_state.tensors().items()}
        read = partial(read_tensors, into=into, rows=rows, begin_piece=pieces.begin_apart)
        found = patiently(partial(read, catalogue, manifest), pieces.rest)
        self._install(manifest.state, found, {t.name: t.shape for t in manifest.tensors})

    def _note_steps(self) -> None:
        """Steps that were committed since the generation began are its own."""
        if self.holding.kind == "rows" and self.train_state.step != self.holding.step:
            step = self.train_state.step
            self.holding = replace(self.holding, step=step, origin=self._generation)

    def _take_rows(
        self,
        claims: list[Ownership],
        formed: Formed,
        mesh: Mesh,
    ) -> tuple[StateVersion, bool]:
        """(what was taken; whether holders have all of it)"""
        group, pieces = formed.group, formed.pieces
        first = claims[0]
        rows = replace(first, kind="rows", world_size=mesh.world_size)
        if claims == [replace(rows, position=mesh.position(r)) for r in range(mesh.world_size)]:
            taken = StateVersion(first.step, first.origin)
            return taken, False  # the same members in the same order
        device, holders = self.model.device, self.backup.holders
        offers, token = self._offers(mesh), self._spec.token
        gather = Regather(group, mesh, offers, holders, token, device, self._memory, pieces)
        found = gather.run(formed.step, formed.known_step, self._give_up_rows)
        pieces.begin()  # the last exchange is over, and what came is no garbage of an abort
        self._live, self._memory = {}, found.memory
        self._is_untouched = False
        self._place(mesh, group.rank(), found.rows)
        shapes = {k.name: k.shape for k in found.kinds if k.is_sharded}
        self._install(found.header, found.rows, shapes)
        return found.label, found.is_held

    def _offers(self, mesh: Mesh) -> list[Offer]:
        """What this rank has in memory: its live rows, and the shadows of other steps."""
        offers: list[Offer] = []
        live = self.holding
        if live.kind == "rows":
            header, tensors = self.train_state.header_and_tensors()
            self._live = tensors
            place = ShardCoord(Mesh(mesh.parallel, live.world_size), live.position)
            label = StateVersion(live.step, live.origin)
            kinds = kinds_of(tensors)
            offers.append(Offer(label, place, tensors, lambda: (header, kinds), is_live=True))
        for shadow in self.backup.finished():
            place = ShardCoord(shadow.mesh, shadow.key.rank)
            label = StateVersion(shadow.key.step, shadow.origin)
            tensors, described = shadow.tensors, shadow.described
            offers.append(Offer(label, place, tensors, described, is_intact=shadow.is_intact))
        return offers

    def _give_up_rows(self) -> dict[str, Tensor]:
        """From now on the returned dict alone has the live rows. They will be given up one by one;
        if that breaks off, the shadows are what is left."""
        self.holding, live, self._live = Ownership(), self._live, {}
        self._is_untouched = False
        self.train_state.settle()
        self.train_state.optimizer.state.clear()
        self.model.vacate()
        return live

    def _place(self, mesh: Mesh, rank: int, rows: dict[str, Tensor] | None = None) -> None:
        """rows: of the state at hand; the parameters' become the model's memory."""
        self.holding = Ownership()  # until the new rows are complete
        if rows is None and self._memory.is_used:  # the old ones can go at once only: first
            self.train_state.settle()
            self.train_state.optimizer.state.clear()
            self.model.vacate()
            self._memory = RowMemory()
        shard = None if mesh.is_standby(rank) else mesh.shard(rank)
        names = [n for n, p in self.model.model.named_parameters() if is_shard(p)]
        given = {n: rows.pop(f"model/{n}") for n in names} if rows is not None else None
        self.model.reshard(shard, mesh.num_shards, given)
        if rows is not None and given is not None:
            rows |= {f"model/{name}": tensor for name, tensor in given.items()}
        self.train_state.optimizer.state.clear()

    def _install(
        self,
        header: Mapping[str, Any],
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """rows: this rank's, or whole where a tensor is replicated; given away. shapes: of the
        whole tensors that may be sharded."""
        parameters = dict(self.model.model.named_parameters())
        tensors: dict[str, Tensor] = {}
        for name, tensor in rows.items():
            pattern = pattern_of(name, shapes.get(name, ()), parameters)
            tensors[name] = tensor if pattern is None else like(tensor, pattern)
        self.train_state.restore(dict(header), tensors)

    def local_parameters(self) -> dict[str, Tensor]:
        return {n: local(p.detach()) for n, p in self.model.model.named_parameters()}

    # --- a step -----------------------------------------------------------------------------
    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> Reducer:
        buffers = self.train_state.buffers.floating
        num_microbatches = self._spec.num_microbatches
        is_bitwise = self._spec.reduction == "bitwise"
        if mesh.is_standby(group.rank()):
            return StandbyReducer(parameters, buffers, group, mesh, num_microbatches)
        if self.model.keeps_parameters:
            return FsdpGradOpReducer(
                self.model,
                parameters,
                buffers,
                group,
                mesh,
                num_microbatches,
                is_bitwise=is_bitwise,
            )
        assert self.collectives is not None
        assert self._replicas is not None
        return FsdpReducer(
            self.model,
            self.collectives,
            self._replicas,
            parameters,
            buffers,
            group,
            mesh,
            num_microbatches,
            is_bitwise=is_bitwise,
        )

    def before_vote(self) -> None:
        """Ranks that stand by take the integer buffers of a step."""
        assert self._group is not None
        group, mesh, buffers = self._group, self.mesh, self.train_state.buffers
        like = buffers.tracked_integers
        if mesh.num_active == mesh.world_size or not like:
            return
        nothing = torch.empty(0, dtype=torch.uint8, device=self.model.device)
        sizes = [t.nbytes for t in like.values()]
        first, size = mesh.ranks()[0], sum(sizes)
        gathered = [nothing.new_empty(size if r == first else 0) for r in range(group.size())]
        mine = nothing
        if group.rank() == first:
            values = buffers.integers.values()
            flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in values]
            mine = torch.cat(flat)
        group.all_gather(gathered, mine).wait()
        if mesh.is_standby(group.rank()):
            pairs = zip(gathered[first].split(sizes), like.items(), strict=True)
            buffers.take_integers(
                {name: p.clone().view(t.dtype).view(t.shape) for p, (name, t) in pairs}
            )

    def apply(self, update: Update) -> None:
        self.train_state.apply(update, self._norm, step_on_rows)

    def reset(self) -> None:
        self.model.reset()

    def leaves(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Where sharded, what the forward has gathered."""
        leaves: dict[str, Tensor] = dict(parameters)
        names = {id(p): name for name, p in parameters.items()}
        for param in self.model.parameters:
            name, whole = names.get(id(param.parameter)), param.gathered
            if name is not None and whole is not None:
                leaves[name] = whole
        return leaves

    def _norm(self, gradients: list[Tensor]) -> float:
        """The 2-norm over the rows of all ranks, in the order of one rank. A collective."""
        assert self._group is not None
        group, mesh = self._group, self.mesh
        is_first = mesh.position(group.rank()) == 0
        is_mine = [  # every row counts once, and every scalar
            mesh.replica(group.rank()) == 0 if is_shard(g) else is_first for g in gradients
        ]
        counted = [local(g) for g, counts in zip(gradients, is_mine, strict=True) if counts]
        host = self.model.host
        mine = row_squares([g.to(host) for g in counted]).to(self.model.device)
        rows = [g.shape[0] if g.dim() else 1 for g in gradients]
        sizes = [[len(mesh.own_rows(n, r)) for n in rows] for r in range(group.size())]
        gathered = [mine.new_empty(sum(of_rank)) for of_rank in sizes]
        group.all_gather(gathered, mine).wait()
        parts = [gathered[rank].split(sizes[rank]) for rank in mesh.ranks()]
        return norm_of_rows(torch.cat([of_rank[i] for i in range(len(rows)) for of_rank in parts]))

    # --- the end ------------------------------------------------------------------------------
    def weights_sha256(self, tell: Callable[[], None] = lambda: None) -> str:
        """The hash of the whole weights; rank 0 holds one whole tensor at a time. A collective.

        tell: called after each tensor.
        """
        assert self._group is not None
        group, mesh = self._group, self.mesh
        names, device = serialization.weight_names(self.model.model), self.model.device
        _, tensors = self.train_state.header_and_tensors()
        whole = (
            (name, whole_on_first(tensors[names[name]], mesh, group, device))
            for name in sorted(names)
        )
        with self._gathering():
            sha256 = hash_of(whole, tell)
            return str(gather_json(group, sha256, self.model.device)[0])


def build_sharded(
    workload: Any,
    spec: WorkerSpec,
    device: torch.device,
    backup: Backup,
    *,
    keeps_parameters: bool,
) -> Sharded:
    """The state at step 0, whole until the first generation. keeps_parameters: ZeRO-2."""
    model = build_model(workload, spec)
    if hasattr(workload, "init_weights"):
        settle_small(model, device)
    else:
        model = model.to(device)
    equip_blocks(model, spec, lambda: True)  # FSDP2 casts whenever it gathers
    sharded_model = ShardedModel(
        model,
        device,
        DTYPES[spec.precision],
        keeps_parameters=keeps_parameters,
        is_offloaded=spec.offload,
    )
    train_state = build_state(model, workload, spec, Casting(model, None))
    check_shardable(train_state.optimizer, spec)
    initial = Initial(train_state, lambda: build_model(workload, spec), spec.seed)
    initialise = getattr(workload, "init_weights", None)
    return Sharded(spec, train_state, sharded_model, initial, initialise, backup)
