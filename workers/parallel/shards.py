"""A worker's shard of the state: what it holds, and how it gets its part of the next generation.

Nobody ever waits for a full copy: the members tell each other what they hold, and every one takes
its boxes from the members, from a checkpoint, or from the initial weights. If a part was lost with
its holder, all find out alike (`ShardLost`), and the run goes back to a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Cuts, Mesh
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.remote import patiently
from workers.backup.backup import Backup
from workers.checkpoint.load import find_newest, read_tensors
from workers.distributed.pieces import Pieces
from workers.parallel.initial import Initial
from workers.parallel.strategy import Entered, Formed
from workers.resharding.assemble import Offer, Regather, StateVersion, newest_whole
from workers.resharding.host_memory import memory_on
from workers.resharding.memory import ShardMemory
from workers.tensors.local import local
from workers.train_state.train_state import TrainState


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a worker has of the state after `step` committed steps. Of "shards" the training state
    tells the step, until `Shards.note_steps`.

    kind: "nothing"; "initial", "checkpoint" or "copies" (in holders): by reference, all of it;
    "shards": those of `position` in the mesh of `world_size` ranks. origin: the generation that
    computed the step, or took it by reference.
    """

    kind: str = "nothing"
    step: int = 0
    position: int = 0
    world_size: int = 1
    origin: int = 0
    cuts: Cuts = ()
    """Of the mesh."""

    def to_json(self) -> list[Any]:
        return [self.kind, self.step, self.position, self.world_size, self.origin, self.cuts]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> "Ownership":
        kind, step, position, world_size, origin, cuts = told
        cuts = tuple(tuple(of_pipeline) for of_pipeline in cuts)
        return cls(kind, step, position, world_size, origin, cuts)


class SplitModel(Protocol):
    """The model whose state the ranks share: rows of its tensors, or those of some blocks."""

    model: nn.Module
    device: torch.device

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        """Of a tensor of this rank's state. ValueError for state that could not be shared again
        after a restore."""
        ...

    def stored_layout(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorLayout:
        """Of a tensor that is whole somewhere else."""
        ...

    def vacate(self) -> None:
        """Give up the memory of what is shared, until `place`; what refers to it keeps it."""
        ...

    def place(self, at: Position, given: dict[str, Tensor] | None) -> None:
        """Every parameter that is shared becomes that position's box of it.

        given: the boxes by name, whose memory becomes the parameters'; where it cannot, they are
        replaced.
        """
        ...

    def as_live(self, name: str, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's box of a tensor of that shape, as the optimizer is to have it."""
        ...


class Shards:
    """One worker's. What is done with them in a step is sharded.py's."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        model: SplitModel,
        initial: Initial,
        backup: Backup,
        memory: ShardMemory | None = None,
    ) -> None:
        """memory: for the boxes; None: as the model's device has it."""
        self._spec, self._train_state, self._model = spec, train_state, model
        self._initial, self._backup = initial, backup
        self._parameters = dict(model.model.named_parameters())
        self.holding = Ownership()
        self._generation = 0
        self._live: dict[str, Tensor] = {}
        self._memory = memory or memory_on(model.device)
        self.moved_bytes = 0
        """From one rank or holder to another, for the generation at hand; of all ranks."""
        self._distrusts_copies = False
        """They could not be read, although holders said that they had them."""
        self.is_untouched = not initial.is_deferred
        """The model still holds all initial weights of its own building."""

    # --- what this worker holds --------------------------------------------------------
    def load(
        self, catalogue: Catalogue, recorded_step: int, begin_piece: Callable[[], None]
    ) -> list[Damage]:
        """Stand for the state on record if holders have all of it, else for the newest good
        checkpoint, else for the initial state, without reading it into memory. Gives the damaged
        checkpoints; WrongInput if all are."""
        held = None
        if recorded_step and not self._distrusts_copies:
            token, parallel = self._spec.token, self._spec.parallel
            held = newest_whole(self._backup.holders, token, parallel, recorded_step)
        step, damaged = (None, []) if held == recorded_step else find_newest(catalogue, begin_piece)
        self.holding = Ownership("initial") if step is None else Ownership("checkpoint", step)
        if held is not None and held > self.holding.step:
            self.holding = Ownership("copies", held)
        self._train_state.step = self.holding.step
        return damaged

    @property
    def held_step(self) -> int:
        """Of shards, or of copies of them."""
        has_some = self.holding.kind != "nothing" or bool(self._backup.own_copies)
        return self._train_state.step if has_some else -1

    def position(self, place: int, world_size: int) -> Position:
        """At another place in the mesh its shard would go on record as one that it is not."""
        held = self.holding
        assert held.kind == "shards", held
        assert (held.world_size, held.position) == (world_size, place), (held, place)
        return self._held_position

    @property
    def _held_position(self) -> Position:
        held = self.holding
        return Position(Mesh(self._spec.parallel, held.world_size, (), held.cuts), held.position)

    @property
    def at_hand(self) -> Position | None:
        """What this rank has in memory: its shards, or else its newest copy of such."""
        if self.holding.kind == "shards":
            return self._held_position
        return next((copy.at for copy in self._backup.finished()), None)

    def forget(self) -> None:
        """Copies that could not be read, although holders said that they had them, are not trusted
        again."""
        self._distrusts_copies = self.holding.kind == "copies"
        self.holding = Ownership()
        self._backup.forget()

    def note_steps(self) -> None:
        """Steps that were committed since the generation began are its own."""
        if self.holding.kind == "shards" and self._train_state.step != self.holding.step:
            step = self._train_state.step
            self.holding = replace(self.holding, step=step, origin=self._generation)

    # --- a part of a generation to come -------------------------------------------------------
    @property
    def is_live(self) -> bool:
        """The model's parameters are its shards of a state."""
        return self.holding.kind == "shards"

    def take_ahead(
        self, at: Position, header: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        """What a newcomer has of it so far, which nobody counts on. tensors: those of `at`, given
        away."""
        self._train_state.settle()
        self.is_untouched = False
        device = self._model.device
        found = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._place(at, found)
        self._install(header, found, {})

    def claim(self, at: Position) -> None:
        """It has all that `at` has."""
        step, origin, mesh = self._train_state.step, self._train_state.origin, at.mesh
        place, size = mesh.position(at.rank), mesh.world_size
        self.holding = Ownership("shards", step, place, size, origin, mesh.cuts)

    # --- a generation begins --------------------------------------------------------------
    def enter(self, formed: Formed, mesh: Mesh, claims: list[Ownership]) -> Entered:
        """The newest state of at most `formed.step` steps that is whole.

        claims: what each rank holds.
        """
        step, origin, is_held, self.moved_bytes = formed.step, formed.generation, False, 0
        references = {c.kind for c in claims if c.step == step} & {"checkpoint", "initial"}
        rank = formed.group.rank()
        if references:
            kind = "checkpoint" if "checkpoint" in references else "initial"
            self._take_reference(Ownership(kind, step), formed, Position(mesh, rank))
        else:
            (step, origin), is_held = self._take_shards(claims, formed, mesh)
        self._generation = formed.generation
        at = mesh.position(rank)
        self.holding = Ownership("shards", step, at, mesh.world_size, origin, mesh.cuts)
        return Entered(origin, is_held)

    def _take_reference(self, held: Ownership, formed: Formed, at: Position) -> None:
        """Where it breaks off, this rank stands for all of that state, as others did before."""
        pieces = formed.pieces
        try:
            if held.kind == "checkpoint":
                assert formed.catalogue is not None
                self._take_checkpoint(formed.catalogue, held.step, at, pieces)
            else:
                self._take_initial(at, pieces)
            pieces.wait_for_all()
        except PeerLost:
            self.holding, self._train_state.step = held, held.step
            raise

    def _take_initial(self, at: Position, pieces: Pieces) -> None:
        values = self._touch()
        self._place(at)
        layout = lambda n, p: self._model.layout(f"model/{n}", p)  # noqa: E731
        self._initial.fill(self._train_state, at, layout, values, pieces.begin_apart)

    def _take_checkpoint(
        self, catalogue: Catalogue, step: int, at: Position, pieces: Pieces
    ) -> None:
        self._touch()
        self._place(at)
        manifest = patiently(partial(catalogue.manifest, step), pieces.rest)
        shapes = {t.name: t.shape for t in manifest.tensors}
        stored = [self._model.stored_layout(t.name, t.dtype, t.shape) for t in manifest.tensors]
        boxes = {layout.name: layout.box(at) for layout in stored}
        into = {name: local(t) for name, t in self._train_state.tensors().items()}
        read = partial(read_tensors, into=into, boxes=boxes, begin_piece=pieces.begin_apart)
        found = patiently(partial(read, catalogue, manifest), pieces.rest)
        self._install(manifest.state, found, shapes)

    def _take_shards(
        self, claims: list[Ownership], formed: Formed, mesh: Mesh
    ) -> tuple[StateVersion, bool]:
        """(what was taken; whether holders have all of it)"""
        group, pieces = formed.group, formed.pieces
        first = claims[0]
        shards = replace(first, kind="shards", world_size=mesh.world_size, cuts=mesh.cuts)
        if claims == [replace(shards, position=mesh.position(r)) for r in range(mesh.world_size)]:
            taken = StateVersion(first.step, first.origin)
            return taken, False  # the same members in the same order
        holders, offers, token = self._backup.holders, self._offers(), self._spec.token
        gather = Regather(group, mesh, offers, holders, token, memory=self._memory, pieces=pieces)
        found = gather.run(formed.step, formed.known_step, self._give_up)
        self.moved_bytes = found.moved_bytes
        pieces.begin()  # the last exchange is over, and what came is no garbage of an abort
        self._live, self._memory = {}, found.memory
        self._touch()
        self._place(Position(mesh, group.rank()), found.shards)
        shapes = {layout.name: layout.shape for layout in found.layouts if layout.is_cut}
        self._install(found.header, found.shards, shapes)
        return found.version, found.is_held

    def _offers(self) -> list[Offer]:
        """What this rank has in memory: its live shards, and its own copies of other steps."""
        offers: list[Offer] = []
        live = self.holding
        if live.kind == "shards":
            header, tensors = self._train_state.header_and_tensors()
            self._live = tensors
            version = StateVersion(live.step, live.origin)
            layouts = [self._model.layout(name, tensor) for name, tensor in tensors.items()]
            describe = lambda: (header, layouts)  # noqa: E731
            offers.append(Offer(version, self._held_position, tensors, describe, is_live=True))
        for copy in self._backup.finished():
            version = StateVersion(copy.key.step, copy.origin)
            tensors, described = copy.tensors, copy.described
            offers.append(Offer(version, copy.at, tensors, described, is_intact=copy.is_intact))
        return offers

    def _give_up(self) -> dict[str, Tensor]:
        """From now on the returned dict alone has the live shards. They will be given up one by
        one; if that breaks off, its own copies are what is left."""
        self.holding, live, self._live = Ownership(), self._live, {}
        self._touch()
        self._vacate()
        return live

    def _touch(self) -> dict[str, Tensor] | None:
        """From here on the model's parameters are shards. Gives the whole initial ones, by name, if
        they are still at hand."""
        whole = self.local_parameters() if self.is_untouched else self._initial.whole
        self.is_untouched, self._initial.whole = False, None
        return whole

    def _vacate(self) -> None:
        self._train_state.settle()
        self._train_state.optimizer.state.clear()
        self._model.vacate()

    def _place(self, at: Position, shards: dict[str, Tensor] | None = None) -> None:
        """shards: of the state at hand; the parameters' become the model's memory."""
        self.holding = Ownership()  # until the new ones are complete
        if shards is None and self._memory.is_used:  # the old ones can go at once only: first
            self._vacate()
            self._memory = self._memory.beside()
        live = {n: f"model/{n}" for n in self._parameters}
        names = [n for n, p in self._parameters.items() if self._model.layout(live[n], p).is_cut]
        given = {n: shards.pop(live[n]) for n in names} if shards is not None else None
        self._model.place(at, given)
        if shards is not None and given is not None:
            shards |= {f"model/{name}": tensor for name, tensor in given.items()}
        self._train_state.optimizer.state.clear()

    def _install(
        self,
        header: Mapping[str, Any],
        shards: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """shards: this rank's, or whole where a tensor is not cut; given away. shapes: of the whole
        tensors that may be cut."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in shards.items():
            tensors[name] = self._model.as_live(name, tensor, shapes.get(name, ()))
        self._train_state.restore(dict(header), tensors)

    def local_parameters(self) -> dict[str, Tensor]:
        return {n: local(p.detach()) for n, p in self._parameters.items()}
