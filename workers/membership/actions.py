"""What a worker's machine asks its process to do, in order: plain values, no behaviour.

Those that take a while end with an event of events.py. Who carries them out is member.py.
"""

from dataclasses import dataclass
from typing import TypeAlias

from elastic.protocol.messages.to_controller import Evaluation, Report
from elastic.protocol.messages.to_worker import Form, Sync


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the controller. What the machine does not know is filled in: the vote and evaluation of
    a `Suspended`, how long the state of a `Joined` took."""

    report: Report


@dataclass(frozen=True, slots=True)
class Abandon:
    """Walk away from the group, or what is to become one, of this generation or an earlier one.
    Whichever thread asks does it, at once: it frees the one that waits."""

    generation: int


@dataclass(frozen=True, slots=True)
class TakeHolders:
    """Where this worker's shard may be kept."""

    holders: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class ProtectState:
    """What was kept last is safe before this worker says that it has stopped."""

    is_pausing: bool
    """The state of this boundary is kept as well."""


# --- the state --------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StopCopy:
    """Follow nobody. What was received stays."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Copy the state of the worker at this address; None: it is gone."""

    address: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class CopyAhead:
    """What this worker is likely to get of a state in parts, from those who have it now. May end
    with CopyLevel or SourceLost."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class ForgetState:
    """Hold nothing: the state comes from the members once a generation forms."""


@dataclass(frozen=True, slots=True)
class LoadState:
    """Ends with StateLoaded."""

    place: str
    recorded_step: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """As a checkpoint, and wait for it."""


@dataclass(frozen=True, slots=True)
class OpenLog:
    place: str


# --- forming ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """And give up what the generations before this one were saving."""

    form: Form


@dataclass(frozen=True, slots=True)
class BeginGroup:
    form: Form


@dataclass(frozen=True, slots=True)
class RollForward:
    """Apply the reduced gradients, with the vote that others have seen complete: StepCommitted."""

    form: Form


@dataclass(frozen=True, slots=True)
class DropGradients:
    """The step after the state's is to be done from its beginning."""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """With the source, up to this state. Ends with CaughtUp or CatchUpFailed."""

    step: int
    origin: int = 0
    """The generation that computed the step."""


@dataclass(frozen=True, slots=True)
class RenewFollowers:
    """Whoever lags behind this worker gets the state as it is now."""


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for the group. Ends with Met or PeersLost."""


@dataclass(frozen=True, slots=True)
class CatchUpLate:
    """While the others, formed already, wait. Ends with StateEntered or CatchUpFailed."""

    step: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class AssembleState:
    """With the other members, of all their parts. PartBegun on the way; ends with StateEntered,
    PartsMissing or PeersLost."""

    form: Form


@dataclass(frozen=True, slots=True)
class SayUnrecorded:
    """The lowest rank reports again what may not have been heard of steps."""

    recorded_step: int


@dataclass(frozen=True, slots=True)
class TakeEvaluation:
    """The newest that the members know of. The lowest rank reports its last one."""

    evaluation: Evaluation | None


@dataclass(frozen=True, slots=True)
class MeetAll:
    """Wait for those that get their state late, and enter the generation with it. Ends with
    EverybodyEntered or PeersLost."""

    form: Form


# --- the end ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WriteFinal:
    """The final state, and its hash. Ends with FinalWritten or PeersLost."""

    generation: int
    log_folder: str | None


Action: TypeAlias = (
    Say
    | Abandon
    | TakeHolders
    | ProtectState
    | StopCopy
    | Follow
    | CopyAhead
    | ForgetState
    | LoadState
    | SaveState
    | OpenLog
    | LeaveGroup
    | BeginGroup
    | RollForward
    | DropGradients
    | CatchUp
    | RenewFollowers
    | Meet
    | CatchUpLate
    | AssembleState
    | SayUnrecorded
    | TakeEvaluation
    | MeetAll
    | WriteFinal
)
