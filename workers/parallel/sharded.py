"""The sharded strategies ("fsdp", "fsdp-grad-op" and "hsdp:S"): each rank has a shard of the state,
FSDP2 gathers the parameters over a generation's groups.

How a worker gets its shard is shards.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup
from workers.distributed.process_group import AnyGroup
from workers.parallel.collectives import Collectives
from workers.parallel.ddp import PlainPasses
from workers.parallel.fsdp import FsdpReducer
from workers.parallel.fsdp2_private.shard_step import check_shardable, step_on_shards
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.fsdp_grad_op import FsdpGradOpReducer
from workers.parallel.hsdp import InactiveReducer
from workers.parallel.initial import Initial, leave_on_host, settle_small
from workers.parallel.over_shards import OverShards, when_lost
from workers.parallel.shard_rows import ShardRows
from workers.parallel.shards import Shards
from workers.parallel.strategy import Entered, Formed, Passes
from workers.reduction.norm import squares_of_shards
from workers.reduction.reducers import Reduced, Reducer
from workers.resharding.memory import PlainMemory
from workers.step.forwards import Forwards, PlainForwards
from workers.step.precision import DTYPES, Casting
from workers.tensors.local import is_shard, layout_of, local
from workers.train_state.build import build_model, build_state, equip_blocks
from workers.train_state.train_state import TrainState, Update


class Sharded(OverShards):
    """See `workers.parallel.strategy.Strategy`."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        model: ShardedModel,
        rows: ShardRows,
        shards: Shards,
        backup: Backup,
    ) -> None:
        super().__init__(spec, train_state, rows, shards, backup)
        self.model = model
        self.collectives: Collectives | None = None
        self._replicas: AnyGroup | None = None
        """Who holds the same shard; None: this rank is inactive."""

    @property
    def is_runnable(self) -> bool:
        """Before the first generation."""
        return self.shards.is_untouched and self.collectives is None

    # --- a generation begins --------------------------------------------------------------
    def enter(self, formed: Formed) -> Entered:
        """The newest state of at most `formed.step` steps that is whole; FSDP2 is connected."""
        group = formed.group
        mesh = self.mesh = Mesh(self._spec.parallel, group.size(), formed.order)
        self.shards.note_steps()
        axis = self._form_axes(mesh, group)  # while all are here: getting shards takes its time
        claims = self.claims(formed)
        self.model.reset()
        entered = self.take_part(formed, claims)
        if axis is not None:
            self.collectives = Collectives(axis, when_lost(formed), formed.gathering)
            self.model.connect(self.collectives, axis, self._sharded_state())
        return entered

    def _sharded_state(self) -> list[Tensor]:
        """What the optimizer keeps of the shards."""
        states = self.train_state.optimizer.state.values()
        return [v for state in states for v in state.values() if is_shard(v)]

    def _form_axes(self, mesh: Mesh, group: AnyGroup) -> AnyGroup | None:
        """The groups of the two axes; the shards' is returned, None if this rank is inactive.
        Raises PeerLost."""
        self.collectives = self._replicas = None
        rank, timeout_s = group.rank(), self._spec.timeouts.join_s
        if mesh.is_inactive(rank):
            return None
        replica, shard = mesh.replica(rank), mesh.shard(rank)
        shards = group.part(f"replica{replica}", mesh.replica_of(rank), timeout_s)
        self._replicas = group.part(f"shard{shard}", mesh.ranks_with_shard(shard), timeout_s)
        return shards

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
        if mesh.is_inactive(group.rank()):
            return InactiveReducer(parameters, buffers, group, mesh, num_microbatches)
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
        self.share_integers()
        if self.train_state.clip_norm is None:
            return reduced
        assert self._group is not None
        parameters, gradients = self.train_state.parameters, reduced.gradients
        # What nobody used will not count.
        present = {n: gradients.get(n, p.detach()) for n, p in parameters.items()}
        mine = [(layout_of("gradient", g), local(g)) for g in present.values()]
        squares = squares_of_shards(mine, self.mesh, self._group, read, self.model.host)
        return replace(reduced, squares=dict(zip(present, squares, strict=True)))

    def apply(self, update: Update) -> None:
        self.train_state.apply(update, step_on_shards)
        self.fitted_over = self.mesh.world_size

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


def build_sharded(
    workload: Any,
    spec: WorkerSpec,
    device: torch.device,
    backup: Backup,
    *,
    keeps_parameters: bool,
) -> Sharded:
    """The state at step 0, whole until the first generation, but in host memory where that is not
    `device`'s. keeps_parameters: ZeRO-2."""
    model, whole = build_model(workload, spec), None
    if hasattr(workload, "init_weights"):
        settle_small(model, device)
    elif device.type == "cpu":
        model = model.to(device)
    else:
        whole = leave_on_host(model, device)
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
    again = lambda: build_model(workload, spec)  # noqa: E731
    initial = Initial(train_state, again, initialise, spec.seed, whole)
    rows = ShardRows(sharded_model)
    memory = PlainMemory(device, sharded_model.host) if device.type != "cpu" else None
    shards = Shards(spec, train_state, rows, initial, backup, memory)
    return Sharded(spec, train_state, sharded_model, rows, shards, backup)
