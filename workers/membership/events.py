"""What a worker's machine is told: commands that have come, and what its own process has done.

What follows is machine.py's; who tells it is member.py.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elastic.protocol.errors import (
    CollectiveRefused,
    DoesNotFit,
    GivenUp,
    NoAnswer,
    PeerLost,
)
from elastic.protocol.messages.to_controller import CollectiveFailed
from elastic.protocol.messages.to_worker import Command


class Loop(Enum):
    """Where the user's loop is."""

    OUTSIDE = "outside"
    """Of steps and evaluations: before, between or after them."""
    STEP = "step"
    EVALUATION = "evaluation"
    RETURNED = "returned"


# --- from the controller ----------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heard:
    """The command has come. The link's thread says so, whatever the main thread does."""

    command: Command


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The main thread takes the command, in the order in which they came, while it waits."""

    command: Command


# --- of the user's loop -----------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LoopMoved:
    to: Loop


@dataclass(frozen=True, slots=True)
class BoundaryReached:
    """The loop asks for its next step."""


@dataclass(frozen=True, slots=True)
class LoopReturned:
    pass


# --- of a step --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StepPrepared:
    """The gradients of the next step are reduced here: the vote begins."""


@dataclass(frozen=True, slots=True)
class GradientsDropped:
    """By all members alike: they do the step again, or the run stops with it."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    step: int
    should_pause: bool
    """The vote asks for a pause at the next boundary."""


@dataclass(frozen=True, slots=True)
class PeersLost:
    """A collective of this worker's generation has failed, or could not be begun."""

    why: str
    is_refused: bool = False
    """The backend refused the call itself."""
    is_explained: bool = False
    """The loop ends the generation of its own accord."""
    too_few: int = 0
    """So many members have no memory for a step, which more had; 0: that is not why."""
    unanswered: str = ""
    """The host that the backend got no answer from; "": that is not why."""

    @classmethod
    def of(cls, error: PeerLost) -> "PeersLost":
        return cls(
            str(error)[:500],
            is_refused=isinstance(error, CollectiveRefused),
            is_explained=isinstance(error, GivenUp),
            too_few=error.num_members if isinstance(error, DoesNotFit) else 0,
            unanswered=error.host if isinstance(error, NoAnswer) else "",
        )

    def report(self, generation: int, rank: int) -> CollectiveFailed:
        return CollectiveFailed(
            generation=generation,
            rank=rank,
            message=self.why,
            is_refused=self.is_refused,
            is_explained=self.is_explained,
            too_few=self.too_few,
            unanswered=self.unanswered,
        )


# --- of forming -------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The state stands at the generation's step, or is to come late, or nobody waits for it."""


@dataclass(frozen=True, slots=True)
class CatchUpFailed:
    why: str


@dataclass(frozen=True, slots=True)
class Met:
    """The group has formed."""


@dataclass(frozen=True, slots=True)
class PartBegun:
    """All have met; this worker begins to get its part of the state."""


@dataclass(frozen=True, slots=True)
class StateEntered:
    """The state is the one that the generation begins with."""

    step: int


@dataclass(frozen=True, slots=True)
class PartsMissing:
    """The members cannot put the state together."""

    why: str


@dataclass(frozen=True, slots=True)
class PartGone:
    """What this worker held was on its way to others when the generation broke."""


@dataclass(frozen=True, slots=True)
class EverybodyEntered:
    pass


# --- of a copy --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StateReplaced:
    """By the source's state of this step."""

    step: int
    origin: int = 0
    """The generation that computed the step."""


@dataclass(frozen=True, slots=True)
class StepFollowed:
    step: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class CopyLevel:
    """Everything that the source has sent is part of the state."""


@dataclass(frozen=True, slots=True)
class SourceLost:
    why: str


# --- of other work ----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StateLoaded:
    step: int
    damaged: tuple[tuple[int, str], ...] = ()
    """Checkpoints that could not be used: step, and what is wrong."""
    origin: int = 0


@dataclass(frozen=True, slots=True)
class FinalWritten:
    weights_sha256: str


Event: TypeAlias = (
    Heard
    | Obeyed
    | LoopMoved
    | BoundaryReached
    | LoopReturned
    | StepPrepared
    | GradientsDropped
    | StepCommitted
    | PeersLost
    | CaughtUp
    | CatchUpFailed
    | Met
    | PartBegun
    | StateEntered
    | PartsMissing
    | PartGone
    | EverybodyEntered
    | StateReplaced
    | StepFollowed
    | CopyLevel
    | SourceLost
    | StateLoaded
    | FinalWritten
)
