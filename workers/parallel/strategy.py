"""How the model and its state are spread over the ranks of a generation: `Strategy`, one class per
kind of spreading.

Who steps, saves, joins or recovers asks the strategy, and knows neither its name nor its tensors.
A new one is a module beside ddp.py and sharded.py, and a line in build.py, which chooses by name;
or a module anywhere, whose function the run names: parallel="package.module:function".
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import BlockSets, Position, TensorLayout
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages.to_controller import Planned
from elastic.store.catalogue import Catalogue, Damage
from workers.backup.backup import Backup
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import AnyGroup
from workers.parallel.ahead import PartAhead
from workers.reduction.reducers import Reduced, Reducer
from workers.step.forwards import Forwards
from workers.step.vote import Loss
from workers.train_state.train_state import TrainState, Update


@dataclass(frozen=True, slots=True)
class Formed:
    """A generation that a group has formed for, to a worker that needs its part of the state."""

    generation: int
    step: int
    """The newest that the state may be of."""
    known_step: int
    """Up to which this worker could report every step that is not on record."""
    group: AnyGroup
    pieces: Pieces
    """Of the work that grows with the state."""
    catalogue: Catalogue | None
    say_lost: Callable[[PeerLost], None]
    """Tells the controller of a collective that failed in a forward or backward."""
    gathering: Callable[[], AbstractContextManager[None]]
    """Entered while this rank waits for its peers in the middle of a forward or backward."""
    order: tuple[int, ...] = ()
    """Of each rank its position in the mesh, as the controller has planned it; empty: its rank. Of
    a model in stages it decides between ranks that have nothing."""
    on_connected: Callable[[], None] = lambda: None
    """All groups of all ranks have formed, and the work begins."""
    say: Callable[[Planned], object] = lambda said: None
    """Tells the controller how the members share the model, where a strategy has planned it."""


@dataclass(frozen=True, slots=True)
class Entered:
    """What a worker has got for a generation."""

    origin: int
    """The generation that computed the step of the state, or took it by reference."""
    is_held: bool
    """Backup servers have all of it."""
    doubled: BlockSets = ()
    """Tensors of these blocks live on two nodes: whoever is left of them has what is lost."""


class Passes(Protocol):
    """How a step's micro-batches go through forward and backward on one rank, for a generation."""

    in_backward: int
    """The micro-batch whose backward runs now, or has run last."""

    @property
    def has_loss(self) -> bool:
        """The forward that runs now, or has run last, ends in the loss, which counts here."""
        ...

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """The micro-batch of each forward of a step; ids: this rank's, each once or more often."""
        ...

    def loader(self, loader: Any) -> Any:
        """What this rank's micro-batches come from; loader: the worker's own
        (`workers.data.loader.AnyLoader`)."""
        ...

    def begin(self, step: int) -> None:
        """Before the first micro-batch of every attempt at a step, after `step` committed ones."""
        ...

    def before_forward(self, microbatch_id: int) -> None:
        """The user's forward of it comes next."""
        ...

    def loss_of(self, returned: Any) -> Loss | None:
        """What the user's loss has returned, checked; None: another rank has it. WrongInput."""
        ...

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        """The forward of a micro-batch has ended. Those backwards that are due now, each told to
        the reducer. loss: scaled; None as `loss_of` gave it. num_left: forwards that follow."""
        ...

    def reset(self) -> None:
        """After a forward or backward that may not have come to its end."""
        ...


class NoPasses:
    """Of a rank that computes no micro-batch."""

    in_backward = -1

    @property
    def has_loss(self) -> bool:
        return True

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def loader(self, loader: Any) -> Any:
        return loader

    def begin(self, step: int) -> None:
        pass

    def before_forward(self, microbatch_id: int) -> None:
        pass

    def loss_of(self, returned: Any) -> Loss | None:
        raise AssertionError("this rank has no micro-batch")

    def backward(self, microbatch_id: int, loss: Tensor | None, num_left: int) -> None:
        raise AssertionError("this rank has no micro-batch")

    def reset(self) -> None:
        pass


class Strategy(Protocol):
    """One worker's side of it, with the state that it spreads."""

    train_state: TrainState
    backup: Backup
    """Where copies go that outlive this process."""
    is_whole: bool
    """Every member holds all of the state: a newcomer copies it from one of them and follows its
    steps, and whoever has prepared a step can be rolled forward to it alone."""
    fitted_over: int
    """Members of the generation that has committed last; 0: before the first step, and where more
    members leave each of them no more memory."""

    @property
    def ahead(self) -> PartAhead | None:
        """How a newcomer copies a part of the state while the others train; None: it gets it when a
        generation forms."""
        ...

    # --- what this worker holds -------------------------------------------------------
    @property
    def held_step(self) -> int:
        """The step of what this worker could give to the next generation; -1: it has nothing."""
        ...

    @property
    def is_runnable(self) -> bool:
        """The model can run without a group."""
        ...

    def load(
        self,
        catalogue: Catalogue,
        recorded_step: int,
        known_step: int,
        begin_piece: Callable[[], None],
    ) -> list[Damage]:
        """Have the state that the run goes on from; gives the damaged checkpoints.

        recorded_step, known_step: steps on record, and up to which this worker could add to it.
        WrongInput if no checkpoint is good, or it is of another model.
        """
        ...

    def forget(self) -> None:
        """What this worker holds is of no generation any more."""
        ...

    def enter(self, formed: Formed) -> Entered:
        """Get this rank's part of the state, and what its forward communicates with. A collective.
        Where every member holds all of the state, it has got it by now.

        Raises PeerLost, ShardLost and DamagedCheckpoint, after which it may hold nothing.
        """
        ...

    def mesh_of(self, world_size: int) -> Mesh:
        """Of the generation at hand."""
        ...

    def position(self, rank: int, world_size: int) -> Position:
        """Whose boxes of the state this worker holds, as `rank` of `world_size` ranks; an
        AssertionError if it holds another's."""
        ...

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        """How the ranks share a tensor of the state. ValueError if nobody could tell."""
        ...

    def examine(
        self, loss: Callable[[Any], Any], batch: Callable[[], Any], *, is_seen: bool = True
    ) -> None:
        """Before the first generation: whether the workload's loss can be spread as it is to be.
        loss: of a micro-batch, as the workload returns it. batch: makes the same one each time.
        is_seen: not only the loss has a look at micro-batches. Raises WrongInput."""
        ...

    # --- a step -----------------------------------------------------------------------
    def passes(self, mesh: Mesh, group: AnyGroup, reducer: Reducer) -> Passes:
        """This generation's way through the micro-batches of a step, told to its reducer."""
        ...

    def forwards(self, mesh: Mesh, group: AnyGroup) -> Forwards:
        """This generation's way through the batches of an evaluation."""
        ...

    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> Reducer:
        """This generation's way through a step's passes, to its reduced gradients."""
        ...

    def before_vote(self, reduced: Reduced, read: Callable[[Tensor], Tensor]) -> Reduced:
        """With what all ranks must know before they vote for a step. A collective. read: of its
        group. Raises PeerLost."""
        ...

    def apply(self, update: Update) -> None:
        """Take a committed step. Nothing communicates behind the vote."""
        ...

    def reset(self) -> None:
        """After a forward or backward that may not have come to its end."""
        ...

    def leaves(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """What autograd sees of each parameter in a forward."""
        ...

    # --- the end ----------------------------------------------------------------------
    def weights_sha256(self, tell: Callable[[], None] = lambda: None) -> str:
        """The hash of the whole weights. May be a collective. tell: called after each tensor."""
        ...
