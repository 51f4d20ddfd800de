""" "ddp": every rank holds the whole state; gradients meet in all-reduces or in the tree.

How a newcomer copies the state is workers/membership/joining.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from workers.backup.backup import Backup, NoBackup
from workers.checkpoint.load import load_newest
from workers.distributed.process_group import AnyGroup
from workers.parallel.initial import initialise_modules, settle_small
from workers.parallel.strategy import Entered, Formed, NoPasses, Passes
from workers.reduction.bitwise import BitwiseReducer
from workers.reduction.fast import FastReducer
from workers.reduction.norm import row_squares
from workers.reduction.reducers import Reduced, Reducer
from workers.step.forwards import Forwards, PlainForwards
from workers.step.precision import DTYPES, Casting
from workers.step.vote import Loss, check_loss
from workers.tensors.local import layout_of
from workers.torch_private.modules import own_parameters
from workers.train_state.build import Settings, build_model, build_state, equip_blocks
from workers.train_state.digest import weights_sha256
from workers.train_state.train_state import TrackedBuffers, TrainState, Update


class PlainPasses(NoPasses):
    """Of a rank that computes whole micro-batches, one after another: a backward behind each
    forward."""

    def __init__(self, reducer: Reducer, buffers: TrackedBuffers) -> None:
        self._reducer, self._buffers = reducer, buffers

    def loss_of(self, returned: Any) -> Loss:
        return check_loss(returned)

    def backward(self, microbatch_id: int, loss: torch.Tensor | None, num_left: int) -> None:
        assert loss is not None
        self.in_backward = microbatch_id
        self._reducer.before_backward(not num_left)
        loss.backward()
        self._reducer.after_backward(microbatch_id, self._buffers.end_microbatch())


class Replicated:
    """See `workers.parallel.strategy.Strategy`."""

    is_whole = True
    ahead = None
    is_runnable = True
    fitted_over = 0

    def __init__(
        self, spec: WorkerSpec, train_state: TrainState, build_again: Callable[[], TrainState]
    ) -> None:
        """build_again: makes the state at step 0."""
        self._spec, self.train_state, self._build_again = spec, train_state, build_again
        self.backup: Backup = NoBackup()

    # --- what this worker holds --------------------------------------------------------
    @property
    def held_step(self) -> int:
        return self.train_state.step

    def load(
        self,
        catalogue: Catalogue,
        recorded_step: int,
        known_step: int,
        begin_piece: Callable[[], None] = lambda: None,
    ) -> list[Damage]:
        """The newest good checkpoint, or what this worker has from peers if that is newer, else
        the initial state."""
        if self.train_state.step > known_step:  # steps in between could not be put on record
            fresh = self._build_again().snapshot()
            self.train_state.restore(fresh.header, {n: fresh.take(n) for n in fresh.shapes})
        try:
            return load_newest(catalogue, self.train_state, begin_piece)
        except ValueError as error:  # the files are good, but of another model
            raise WrongInput(f"the checkpoint does not fit the workload: {error}") from error

    def forget(self) -> None:
        pass  # a peer's state will replace it

    def enter(self, formed: Formed) -> Entered:
        return Entered(formed.generation, is_held=False)  # this worker has it

    def mesh_of(self, world_size: int) -> Mesh:
        return Mesh(self._spec.parallel, world_size)

    def position(self, rank: int, world_size: int) -> Position:
        return Position(self.mesh_of(world_size), rank)

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        return layout_of(name, tensor)

    def examine(
        self, loss: Callable[[Any], Any], batch: Callable[[], Any], *, is_seen: bool = True
    ) -> None:
        pass  # every rank computes whole micro-batches

    # --- a step ------------------------------------------------------------------------
    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Reducer) -> Passes:
        return PlainPasses(reducer, self.train_state.buffers)

    def forwards(self, mesh: Mesh, group: AnyGroup) -> Forwards:
        return PlainForwards(mesh, group.rank(), is_collective=False)

    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> Reducer:
        buffers, num_microbatches = self.train_state.buffers.floating, self._spec.num_microbatches
        if self._spec.reduction == "fast":
            return FastReducer(parameters, buffers, group)
        ids = mesh.ids(num_microbatches, group.rank())
        return BitwiseReducer(parameters, buffers, group, ids, num_microbatches)

    def before_vote(self, reduced: Reduced, read: Callable[[Tensor], Tensor]) -> Reduced:
        gradients = reduced.gradients
        if self.train_state.clip_norm is None or not gradients:
            return reduced
        squares = read(row_squares(list(gradients.values())))
        rows = [g.shape[0] if g.dim() else 1 for g in gradients.values()]
        return replace(reduced, squares=dict(zip(gradients, squares.split(rows), strict=True)))

    def apply(self, update: Update) -> None:
        self.train_state.apply(update)

    def reset(self) -> None:
        pass

    def leaves(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return dict(parameters)

    # --- the end -----------------------------------------------------------------------
    def weights_sha256(self, tell: Callable[[], None] = lambda: None) -> str:
        return weights_sha256(self.train_state.model, tell)


def build_replicated(workload: Any, spec: WorkerSpec, device: torch.device) -> Replicated:
    def build() -> TrainState:
        return build_replica(workload, spec, device)

    return Replicated(spec, build(), build)


def build_replica(workload: Any, spec: Settings, device: torch.device) -> TrainState:
    """The whole state at step 0. Raises WrongInput; the user's own exceptions pass through."""
    model = build_model(workload, spec)
    if hasattr(workload, "init_weights"):
        settle_small(model, device)
        _materialise(model, workload, spec, device)
    else:
        model = model.to(device)
    casting = Casting(model, DTYPES[spec.precision])
    equip_blocks(model, spec, lambda: casting.is_applied)
    return build_state(model, workload, spec, casting)


@torch.no_grad()
def _materialise(model: nn.Module, workload: Any, spec: Settings, device: torch.device) -> None:
    """All of a model that was built on the meta device, its buffers excepted."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in own_parameters(module).items():
            if p is not None:
                if p not in made:
                    empty = torch.empty_like(p, device=device)
                    made[p] = nn.Parameter(empty, requires_grad=p.requires_grad)
                own_parameters(module)[key] = made[p]
    targets = dict(model.named_parameters())

    def put(name: str, whole: torch.Tensor) -> None:
        targets[name].copy_(whole)

    initialise_modules(model, workload.init_weights, spec.seed, put)
