"""What strategies have in common whose ranks hold a part of the state each: `OverShards`.

A subclass says what a generation's mesh is, how gradients are summed, and what a step's passes are.
How a worker gets its part is shards.py's; where the parts of a tensor are, the model's
(`workers.parallel.shards.SplitModel`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
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
from workers.parallel.ahead import PartAhead
from workers.parallel.shards import Ownership, Shards, SplitModel
from workers.parallel.strategy import Entered, Formed
from workers.resharding.whole import whole_on_first
from workers.tensors.local import flat_bytes
from workers.train_state import serialization
from workers.train_state.digest import hash_of
from workers.train_state.train_state import TrainState, Update


class OverShards:
    """See `workers.parallel.strategy.Strategy`."""

    is_whole = False
    ahead: PartAhead | None = None

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        split_model: SplitModel,
        shards: Shards,
        backup: Backup,
    ) -> None:
        self._spec, self.train_state = spec, train_state
        self._split_model, self.shards, self.backup = split_model, shards, backup
        self.mesh = Mesh(spec.parallel, 1)
        """Of the generation at hand."""
        self.fitted_over = 0
        self._group: AnyGroup | None = None
        self._gathering: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_runnable(self) -> bool:
        """Before the first generation."""
        return self.shards.is_untouched and self._group is None

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
        return self._split_model.layout(name, tensor)

    def forget(self) -> None:
        self.shards.forget()

    # --- a generation begins --------------------------------------------------------------
    def claims(self, formed: Formed) -> list[Ownership]:
        """What each rank holds, and over how many the last step did fit, which a newcomer does not
        know. A collective; raises PeerLost. After it the work begins that grows with the state."""
        mine = [self.shards.holding.to_json(), self.fitted_over]
        claimed, fitted_over = zip(*gather_json(formed.group, mine), strict=True)
        self.fitted_over = max(fitted_over)
        formed.on_connected()
        formed.pieces.begin()
        return [Ownership.from_json(c) for c in claimed]

    def take_part(self, formed: Formed, claims: list[Ownership]) -> Entered:
        """Get this rank's part of the newest state of at most `formed.step` steps that is whole,
        for `mesh`. A collective, with what `Strategy.enter` raises."""
        entered = self.shards.enter(formed, self.mesh, claims)
        self._group, self._gathering = formed.group, formed.gathering
        return entered

    def examine(
        self, loss: Callable[[Any], Any], batch: Callable[[], Any], *, is_seen: bool = True
    ) -> None:
        pass  # every rank computes whole micro-batches

    # --- a step -----------------------------------------------------------------------------
    def share_integers(self) -> None:
        """Ranks that are inactive take the integer buffers of a step. A collective."""
        assert self._group is not None
        group, mesh, buffers = self._group, self.mesh, self.train_state.buffers
        like = buffers.tracked_integers
        if mesh.num_active == mesh.world_size or not like:
            return
        nothing = torch.empty(0, dtype=torch.uint8, device=self._split_model.device)
        sizes = [t.nbytes for t in like.values()]
        first, size = mesh.ranks()[0], sum(sizes)
        gathered = [nothing.new_empty(size if r == first else 0) for r in range(group.size())]
        mine = nothing
        if group.rank() == first:
            values = buffers.integers.values()
            flat = [flat_bytes(t) for t in values]
            mine = torch.cat(flat)
        group.all_gather(gathered, mine).wait()
        if mesh.is_inactive(group.rank()):
            pairs = zip(gathered[first].split(sizes), like.items(), strict=True)
            buffers.take_integers(
                {name: p.clone().view(t.dtype).view(t.shape) for p, (name, t) in pairs}
            )

    def apply(self, update: Update) -> None:
        self.train_state.apply(update)
        self.fitted_over = self.mesh.world_size

    def reset(self) -> None:
        pass

    def leaves(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return dict(parameters)

    # --- the end ------------------------------------------------------------------------------
    def weights_sha256(self, tell: Callable[[], None] = lambda: None) -> str:
        """The hash of the whole weights; rank 0 holds one whole tensor at a time. A collective.

        tell: called after each tensor.
        """
        assert self._group is not None
        group, device = self._group, self._split_model.device
        names = serialization.weight_names(self._split_model.model)
        _, tensors = self.train_state.header_and_tensors()

        def whole(name: str) -> Tensor:
            tensor = tensors[names[name]]
            layout = self.layout(names[name], tensor)
            return whole_on_first(tensor, layout, self.mesh, group, device)

        with self._gathering():
            sha256 = hash_of(((name, whole(name)) for name in sorted(names)), tell)
            return str(gather_json(group, sha256)[0])


def when_lost(formed: Formed) -> Callable[[PeerLost], NoReturn]:
    """For a collective in the middle of a forward or backward: the controller is told, and the step
    is cancelled."""

    def on_lost(error: PeerLost) -> NoReturn:
        formed.say_lost(error)
        raise StepCancelled from error

    return on_lost
