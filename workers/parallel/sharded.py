"""The sharded strategies ("fsdp", "fsdp-grad-op" and "hsdp:S"): each rank has a shard of the state,
FSDP2 gathers the parameters over a generation's groups.

How a worker gets its shard is shards.py's.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost, StepCancelled
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from workers.backup.backup import Backup
from workers.distributed.exchange import gather_json
from workers.distributed.process_group import AnyGroup
from workers.parallel.collectives import Collectives
from workers.parallel.fsdp import FsdpReducer
from workers.parallel.fsdp2_private.shard_step import check_shardable, step_on_shards
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.fsdp_grad_op import FsdpGradOpReducer
from workers.parallel.hsdp import StandbyReducer
from workers.parallel.initial import Initial, settle_small
from workers.parallel.shard_rows import ShardRows
from workers.parallel.shards import Ownership, Shards
from workers.parallel.strategy import Entered, Formed
from workers.reduction.norm import squares_of_shards
from workers.reduction.reducers import Reduced, Reducer
from workers.resharding.whole import whole_on_first
from workers.step.forwards import Forwards, PlainForwards
from workers.step.passes import Passes, PlainPasses
from workers.step.precision import DTYPES, Casting
from workers.tensors.local import is_shard, layout_of, local
from workers.train_state import serialization
from workers.train_state.build import build_model, build_state, equip_blocks
from workers.train_state.digest import hash_of
from workers.train_state.train_state import TrainState, Update


class Sharded:
    """See `workers.parallel.strategy.Strategy`."""

    is_whole = False

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        model: ShardedModel,
        rows: ShardRows,
        shards: Shards,
        backup: Backup,
    ) -> None:
        self._spec, self.train_state, self.model = spec, train_state, model
        self._rows, self.shards, self.backup = rows, shards, backup
        self.collectives: Collectives | None = None
        self.mesh = Mesh(spec.parallel, 1)
        """Of the generation at hand."""
        self._group: AnyGroup | None = None
        self._replicas: AnyGroup | None = None
        """Who holds the same shard; None: this rank stands by."""
        self._gathering: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_runnable(self) -> bool:
        """Before the first generation."""
        return self.shards.is_untouched and self.collectives is None

    # --- what this worker holds --------------------------------------------------------
    def load(
        self,
        catalogue: Catalogue,
        recorded_step: int = 0,
        known_step: int = 0,
        begin_piece: Callable[[], None] = lambda: None,
    ) -> list[Damage]:
        return self.shards.load(catalogue, recorded_step, begin_piece)

    @property
    def held_step(self) -> int:
        return self.shards.held_step

    def mesh_of(self, world_size: int) -> Mesh:
        return self.mesh

    def position(self, rank: int, world_size: int) -> Position:
        return self.shards.position(self.mesh.position(rank), world_size)

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        return self._rows.layout(name, tensor)

    def forget(self) -> None:
        self.shards.forget()

    # --- a generation begins --------------------------------------------------------------
    def enter(self, formed: Formed) -> Entered:
        """The newest state of at most `formed.step` steps that is whole; FSDP2 is connected."""
        group = formed.group

        def on_lost(error: PeerLost) -> NoReturn:
            formed.say_lost(error)
            raise StepCancelled from error

        mesh = self.mesh = Mesh(self._spec.parallel, group.size(), formed.order)
        self.shards.note_steps()
        axis = self._form_axes(mesh, group)  # while all are here: getting shards takes its time
        claimed = gather_json(group, self.shards.holding.to_json())
        formed.on_connected()
        formed.pieces.begin()
        self.model.reset()
        entered = self.shards.enter(formed, mesh, [Ownership.from_json(c) for c in claimed])
        self._group, self._gathering = group, formed.gathering
        if axis is not None:
            self.collectives = Collectives(axis, on_lost, formed.gathering)
            self.model.connect(self.collectives, axis, self._sharded_state())
        return entered

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
        replica, shard = mesh.replica(rank), mesh.shard(rank)
        shards = group.part(f"replica{replica}", mesh.replica_of(rank), timeout_s)
        self._replicas = group.part(f"shard{shard}", mesh.holders_of(shard), timeout_s)
        return shards

    def examine(self, compute: Callable[[], Any]) -> None:
        pass  # every rank computes whole micro-batches

    # --- a step -----------------------------------------------------------------------------
    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Reducer) -> Passes:
        return PlainPasses(reducer, self.train_state.buffers)

    def forwards(self, mesh: Mesh, group: AnyGroup) -> Forwards:
        return PlainForwards(mesh, group.rank(), is_collective=True)

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
            parameters,
            buffers,
            group,
            mesh,
            num_microbatches,
            collectives=self.collectives,
            replicas=self._replicas,
            is_bitwise=is_bitwise,
        )

    def before_vote(self, reduced: Reduced, read: Callable[[Tensor], Tensor]) -> Reduced:
        self._share_integers()
        if self.train_state.clip_norm is None:
            return reduced
        assert self._group is not None
        parameters, gradients = self.train_state.parameters, reduced.gradients
        # What nobody used will not count.
        present = {n: gradients.get(n, p.detach()) for n, p in parameters.items()}
        mine = [(layout_of("gradient", g), local(g)) for g in present.values()]
        squares = squares_of_shards(mine, self.mesh, self._group, read, self.model.host)
        return replace(reduced, squares=dict(zip(present, squares, strict=True)))

    def _share_integers(self) -> None:
        """Ranks that stand by take the integer buffers of a step. A collective."""
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
        self.train_state.apply(update, step_on_shards)

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

    # --- the end ------------------------------------------------------------------------------
    def weights_sha256(self, tell: Callable[[], None] = lambda: None) -> str:
        """The hash of the whole weights; rank 0 holds one whole tensor at a time. A collective.

        tell: called after each tensor.
        """
        assert self._group is not None
        group, mesh = self._group, self.mesh
        names, device = serialization.weight_names(self.model.model), self.model.device
        _, tensors = self.train_state.header_and_tensors()

        def whole(name: str) -> Tensor:
            tensor = tensors[names[name]]
            return whole_on_first(tensor, layout_of(name, tensor), mesh, group, device)

        with self._gathering():
            sha256 = hash_of(((name, whole(name)) for name in sorted(names)), tell)
            return str(gather_json(group, sha256)[0])


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
    initialise = getattr(workload, "init_weights", None)
    initial = Initial(train_state, lambda: build_model(workload, spec), initialise, spec.seed)
    rows = ShardRows(sharded_model)
    shards = Shards(spec, train_state, rows, initial, backup)
    return Sharded(spec, train_state, sharded_model, rows, shards, backup)
