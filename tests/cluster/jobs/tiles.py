"""A strategy that exists for tests only: two axes cut each tensor of the state into tiles.

Rows lie across `dp_shard` and columns across `tp`, so no rank holds a whole tensor between steps.
Nothing of the project knows it: `parallel="fsdp-grad-op,tp:2,tiles:build_tiled"` names it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Axis, Mesh
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup
from workers.distributed.process_group import AnyGroup
from workers.parallel.ddp import PlainPasses
from workers.parallel.initial import Initial
from workers.parallel.over_shards import OverShards, when_lost
from workers.parallel.replicated_sums import ReplicatedSums
from workers.parallel.shards import Shards
from workers.parallel.strategy import Entered, Formed, NoPasses, Passes
from workers.reduction.norm import row_squares
from workers.reduction.reducers import Reduced
from workers.step.forwards import PlainForwards
from workers.step.precision import Casting
from workers.step.vote import Loss
from workers.tensors.local import part_of
from workers.train_state.build import build_model, build_state
from workers.train_state.serialization import parameters_named
from workers.train_state.train_state import TrainState

TILED = f"fsdp-grad-op,tp:2,{__name__}:build_tiled"


def build_tiled(
    workload: Any, spec: WorkerSpec, device: torch.device, open_backup: Callable[[], Backup]
) -> "Tiled":
    model = build_model(workload, spec).to(device)
    train_state, backup = build_state(model, workload, spec, Casting(model, None)), open_backup()
    initial = Initial(train_state, lambda: build_model(workload, spec), None, spec.seed)
    tiles = Tiles(model, device)
    return Tiled(
        spec, train_state, tiles, Shards(spec, train_state, tiles, initial, backup), backup
    )


class Tiles:
    """See `workers.parallel.shards.SplitModel`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.parameters = dict(model.named_parameters())
        self.whole = {name: p.detach().clone() for name, p in self.parameters.items()}
        """As they are at the start: their shapes and dtypes."""
        self._tiles: dict[str, Tensor] = {}
        """While the parameters are whole."""

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        dtype, owner = str(tensor.dtype).removeprefix("torch."), self._owner(name)
        if owner is None or not tensor.dim():
            return TensorLayout(name, dtype, tuple(tensor.shape))
        return self.stored_layout(name, dtype, tuple(self.whole[owner].shape))

    def stored_layout(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorLayout:
        is_cut = shape and self._owner(name) is not None
        columns: Axis = "tp"
        cuts = (("dp_shard", 0), (columns, len(shape) - 1)) if is_cut else ()
        return TensorLayout(name, dtype, shape, cuts)

    def _owner(self, name: str) -> str | None:
        return next((n for n in parameters_named(name) if n in self.parameters), None)

    def vacate(self) -> None:
        for name, parameter in self.parameters.items():
            if self.whole[name].dim():
                parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    def place(self, at: Position, given: dict[str, Tensor] | None) -> None:
        for name, parameter in self.parameters.items():
            layout = self.layout(f"model/{name}", parameter)
            if layout.is_cut:
                shape = layout.box(at).shape
                parameter.data = given[name] if given else parameter.data.new_empty(shape)

    def as_live(self, name: str, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        return shard

    @torch.no_grad()
    def gather(self, mesh: Mesh, group: AnyGroup) -> None:
        """The parameters become whole, until `release`. A collective; raises PeerLost."""
        self.release()
        layouts = {n: self.layout(f"model/{n}", p) for n, p in self.parameters.items()}
        tiles = {n: p.data for n, p in self.parameters.items() if layouts[n].is_cut}
        boxes = [[layouts[n].box(Position(mesh, r)) for n in tiles] for r in range(group.size())]
        mine = torch.cat([t.reshape(-1) for t in tiles.values()])
        flat = [mine.new_empty(sum(box.size for box in of_rank)) for of_rank in boxes]
        group.all_gather(flat, mine).wait()
        whole = {n: t.new_empty(layouts[n].shape) for n, t in tiles.items()}
        for of_rank, values in zip(boxes, flat, strict=True):
            parts = values.split([box.size for box in of_rank])
            for name, box, part in zip(tiles, of_rank, parts, strict=True):
                part_of(whole[name], box).copy_(part.view(box.shape))
        self._tiles = tiles
        for name, tensor in whole.items():
            self.parameters[name].data = tensor

    def release(self) -> None:
        """The parameters are tiles again."""
        for name, tile in self._tiles.items():
            self.parameters[name].grad, self.parameters[name].data = None, tile
        self._tiles = {}


class Tiled(OverShards):
    """The ranks along `tp` compute the same micro-batches, and the first of them has the loss."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        tiles: Tiles,
        shards: Shards,
        backup: Backup,
    ) -> None:
        super().__init__(spec, train_state, tiles, shards, backup)
        self._tiles = tiles
        self._formed: Formed | None = None

    def enter(self, formed: Formed) -> Entered:
        self.mesh, self._formed = (
            Mesh(self._spec.parallel, formed.group.size(), formed.order),
            formed,
        )
        self._tiles.release()
        self.shards.note_steps()
        return self.take_part(formed, self.claims(formed))

    def gather(self, mesh: Mesh, group: AnyGroup) -> None:
        assert self._formed is not None
        try:
            self._tiles.gather(mesh, group)
        except PeerLost as error:
            when_lost(self._formed)(error)

    def reset(self) -> None:
        self._tiles.release()

    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> "TiledReducer":
        return TiledReducer(self, self._tiles, mesh, group, self._spec.num_microbatches)

    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Any) -> Passes:
        if mesh.is_inactive(group.rank()):
            return NoPasses()
        return TiledPasses(self, reducer, mesh.coordinate("tp", group.rank()) == 0)

    def forwards(self, mesh: Mesh, group: AnyGroup) -> PlainForwards:
        self.gather(mesh, group)
        return TiledForwards(self, mesh, group.rank())

    def before_vote(self, reduced: Reduced, read: Callable[[Tensor], Tensor]) -> Reduced:
        self.share_integers()
        return reduced  # the reducer knows the squares: it has had the whole gradients


class TiledPasses(PlainPasses):
    def __init__(self, strategy: Tiled, reducer: Any, has_loss: bool) -> None:
        super().__init__(reducer, strategy.train_state.buffers)
        self._strategy, self._is_first = strategy, has_loss
        self._loss: Loss | None = None

    @property
    def has_loss(self) -> bool:
        return self._is_first

    def loss_of(self, returned: Any) -> Loss | None:
        self._loss = super().loss_of(returned)
        return self._loss if self._is_first else None

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        assert self._loss is not None
        super().backward(microbatch_id, self._loss[0] if loss is None else loss, num_left)

    def reset(self) -> None:
        self._strategy.reset()


class TiledForwards(PlainForwards):
    def __init__(self, strategy: Tiled, mesh: Mesh, rank: int) -> None:
        super().__init__(mesh, rank, is_collective=False)
        self._strategy = strategy

    def end(self) -> None:
        self._strategy.reset()


class TiledReducer:
    """See `workers.reduction.reducers.Reducer`: all ranks sum whole gradients, and keep tiles."""

    def __init__(
        self, strategy: Tiled, tiles: Tiles, mesh: Mesh, group: AnyGroup, num_microbatches: int
    ) -> None:
        self._strategy, self._tiles, self._mesh, self._group = strategy, tiles, mesh, group
        dtype = next(iter(tiles.whole.values())).dtype
        self._sums = ReplicatedSums(tiles.whole, group, mesh, num_microbatches, dtype)
        floating = strategy.train_state.buffers.floating
        self._buffers = ReplicatedSums(floating, group, mesh, num_microbatches)
        self.used: set[str] = set()

    def begin(self) -> None:
        self.used = set()
        self._sums.begin()
        self._buffers.begin()
        self._strategy.gather(self._mesh, self._group)
        self._drop()

    def _drop(self) -> None:
        for parameter in self._tiles.parameters.values():
            parameter.grad = None

    def before_backward(self, is_last: bool) -> None:
        pass

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        whole = self._tiles.whole
        gradients = {n: p.grad for n, p in self._tiles.parameters.items()}
        self.used |= {n for n, g in gradients.items() if g is not None}
        leaves = [torch.zeros_like(whole[n]) if g is None else g for n, g in gradients.items()]
        self._sums.add(microbatch_id, leaves)
        self._buffers.add(microbatch_id, buffers)
        self._drop()

    def serve_pass(self) -> None:
        raise AssertionError("nobody waits for a pass of this strategy")

    def finish(self) -> Reduced:
        buffers, whole = self._buffers.finish(), self._sums.finish()
        self._tiles.release()
        at, found, squares = Position(self._mesh, self._group.rank()), {}, {}
        for name, gradient in whole.items():
            layout = self._tiles.stored_layout(f"model/{name}", "", tuple(gradient.shape))
            found[name] = part_of(gradient, layout.box(at)).clone() if layout.is_cut else gradient
            squares[name] = row_squares([gradient])
        return Reduced(found, buffers, squares)

    def close(self) -> None:
        self._drop()
