"""A worker's shard of the state: what it holds, and how it gets its part of the next generation.

Nobody ever waits for a full copy: the members tell each other what they hold, and every one takes
its boxes from the members, from a checkpoint, or from the initial weights. If a part was lost with
its holder, all find out alike (`ShardLost`), and the run goes back to a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.remote import patiently
from workers.backup.backup import Backup
from workers.checkpoint.load import find_newest, read_tensors
from workers.distributed.pieces import Pieces
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.initial import Initial
from workers.parallel.strategy import Entered, Formed
from workers.resharding.assemble import Offer, Regather, StateVersion, newest_whole
from workers.resharding.host_memory import memory_on
from workers.tensors.local import is_shard, layout_of, like, local
from workers.train_state.train_state import TrainState


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a worker has of the state after `step` committed steps (shards follow the replica's).

    kind: "nothing"; "initial", "checkpoint" or "copies" (in holders): by reference, all of it;
    "shards": those of `position` in the mesh of `world_size` ranks. origin: the generation that
    computed the step, or took it by reference.
    """

    kind: str = "nothing"
    step: int = 0
    position: int = 0
    world_size: int = 1
    origin: int = 0

    def to_json(self) -> list[Any]:
        return [self.kind, self.step, self.position, self.world_size, self.origin]


class Shards:
    """One worker's. What is done with them in a step is sharded.py's."""

    def __init__(
        self,
        spec: WorkerSpec,
        train_state: TrainState,
        model: ShardedModel,
        initial: Initial,
        backup: Backup,
    ) -> None:
        self._spec, self._train_state, self._model = spec, train_state, model
        self._initial, self._backup = initial, backup
        self._parameters = dict(model.model.named_parameters())
        self.holding = Ownership()
        self._layouts: dict[object, TensorLayout] = {}
        """Known ones: a copy of every step asks for all of them."""
        self._generation = 0
        self._live: dict[str, Tensor] = {}
        self._memory = memory_on(model.device)
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
        """Of shards, or of shadows of them."""
        has_some = self.holding.kind != "nothing" or bool(self._backup.shadows)
        return self._train_state.step if has_some else -1

    def position(self, place: int, world_size: int) -> Position:
        """At another place in the mesh its shard would go on record as one that it is not."""
        held = self.holding
        assert held.kind == "shards", held
        assert (held.world_size, held.position) == (world_size, place), (held, place)
        return self._held_position

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        """ValueError for state that could not be sharded again after a restore."""
        key = (name, tensor.dtype, tensor.shape, is_shard(tensor))
        layout = self._layouts.get(key)
        if layout is None:
            layout = layout_of(name, tensor)
            if layout.is_cut and pattern_of(name, layout.shape, self._parameters) is None:
                raise ValueError(
                    f"{name} is cut as {layout.cuts}, and no parameter of this name is: state of "
                    "the optimizer must have its parameter's shape (torch.zeros_like(parameter)) "
                    "or be made without it"
                )
            self._layouts[key] = layout
        return layout

    @property
    def _held_position(self) -> Position:
        return Position(Mesh(self._spec.parallel, self.holding.world_size), self.holding.position)

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

    # --- a generation begins --------------------------------------------------------------
    def enter(self, formed: Formed, mesh: Mesh, claims: list[Ownership]) -> Entered:
        """The newest state of at most `formed.step` steps that is whole.

        claims: what each rank holds.
        """
        step, origin, is_held = formed.step, formed.generation, False
        references = {c.kind for c in claims if c.step == step} & {"checkpoint", "initial"}
        rank = formed.group.rank()
        if references:
            kind = "checkpoint" if "checkpoint" in references else "initial"
            self._take_reference(Ownership(kind, step), formed, Position(mesh, rank))
        else:
            (step, origin), is_held = self._take_shards(claims, formed, mesh)
        self._generation = formed.generation
        self.holding = Ownership("shards", step, mesh.position(rank), mesh.world_size, origin)
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
        values = self.local_parameters() if self.is_untouched else None
        self.is_untouched = False  # from here on its parameters are shards
        self._place(at)
        self._initial.fill(self._train_state, at, values, pieces.begin_apart)

    def _take_checkpoint(
        self, catalogue: Catalogue, step: int, at: Position, pieces: Pieces
    ) -> None:
        self.is_untouched = False
        self._place(at)
        manifest = patiently(partial(catalogue.manifest, step), pieces.rest)
        shapes = {t.name: t.shape for t in manifest.tensors}
        patterns = {name: pattern_of(name, s, self._parameters) for name, s in shapes.items()}
        boxes = {n: layout_of(n, p).box(at) for n, p in patterns.items() if p is not None}
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
        shards = replace(first, kind="shards", world_size=mesh.world_size)
        if claims == [replace(shards, position=mesh.position(r)) for r in range(mesh.world_size)]:
            taken = StateVersion(first.step, first.origin)
            return taken, False  # the same members in the same order
        holders, offers, token = self._backup.holders, self._offers(), self._spec.token
        gather = Regather(group, mesh, offers, holders, token, memory=self._memory, pieces=pieces)
        found = gather.run(formed.step, formed.known_step, self._give_up)
        pieces.begin()  # the last exchange is over, and what came is no garbage of an abort
        self._live, self._memory = {}, found.memory
        self.is_untouched = False
        self._place(Position(mesh, group.rank()), found.shards)
        shapes = {layout.name: layout.shape for layout in found.layouts if layout.is_cut}
        self._install(found.header, found.shards, shapes)
        return found.label, found.is_held

    def _offers(self) -> list[Offer]:
        """What this rank has in memory: its live shards, and the shadows of other steps."""
        offers: list[Offer] = []
        live = self.holding
        if live.kind == "shards":
            header, tensors = self._train_state.header_and_tensors()
            self._live = tensors
            label = StateVersion(live.step, live.origin)
            layouts = [self.layout(name, tensor) for name, tensor in tensors.items()]
            describe = lambda: (header, layouts)  # noqa: E731
            offers.append(Offer(label, self._held_position, tensors, describe, is_live=True))
        for shadow in self._backup.finished():
            label = StateVersion(shadow.key.step, shadow.origin)
            tensors, described = shadow.tensors, shadow.described
            offers.append(Offer(label, shadow.at, tensors, described, is_intact=shadow.is_intact))
        return offers

    def _give_up(self) -> dict[str, Tensor]:
        """From now on the returned dict alone has the live shards. They will be given up one by
        one; if that breaks off, the shadows are what is left."""
        self.holding, live, self._live = Ownership(), self._live, {}
        self.is_untouched = False
        self._vacate()
        return live

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
        shard = None if at.mesh.is_standby(at.rank) else at.mesh.shard(at.rank)
        names = [n for n, p in self._parameters.items() if is_shard(p)]
        given = {n: shards.pop(f"model/{n}") for n in names} if shards is not None else None
        self._model.reshard(shard, at.mesh.num_shards, given)
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
            pattern = pattern_of(name, shapes.get(name, ()), self._parameters)
            tensors[name] = tensor if pattern is None else like(tensor, pattern)
        self._train_state.restore(dict(header), tensors)

    def local_parameters(self) -> dict[str, Tensor]:
        return {n: local(p.detach()) for n, p in self._parameters.items()}


def pattern_of(
    name: str, shape: tuple[int, ...], parameters: Mapping[str, Tensor]
) -> Tensor | None:
    """The sharded parameter that the tensor `name` of a state
    (workers/train_state/serialization.py) is sharded as: itself, or the one whose optimizer state
    it is, if that has its shape. None: it is replicated.
    """
    kind, _, rest = name.partition("/")
    candidates = [rest] if kind == "model" else []
    if kind == "optimizer":
        parts = rest.split("/")
        candidates = ["/".join(parts[:n]) for n in range(1, len(parts))]
    for candidate in candidates:
        parameter = parameters.get(candidate)
        if parameter is not None and is_shard(parameter) and tuple(parameter.shape) == shape:
            return parameter
    return None
