"""What a worker tells the controller, over its link."""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from elastic.protocol.messages.direction import Direction
from elastic.protocol.step_record import STEP_RECORD, StepMetrics, StepRecord, VoteHead


@dataclass(frozen=True, slots=True)
class Process:
    """Where a worker's process is."""

    node_id: str
    node_ip: str
    pid: int
    device: str
    peer_address: tuple[str, int]
    """Where it listens for peers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one that was completed."""

    step: int
    ordinal: int
    """How many were completed before it at this step."""
    values: dict[str, float]
    generation: int


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first report over each connection: where the worker stands."""

    kind: str
    """One of elastic.control.standing.KINDS."""
    controller_before: tuple[str, int]
    """Where its pulse has dialled until now."""
    generation: int = 0
    rank: int = 0
    world_size: int = 0
    step: int = 0
    process: Process | None = None
    """None while it is starting."""
    origin: int = 0
    """The generation that computed `step`; 0: the run, or a launch of it, began with it."""


@dataclass(frozen=True, slots=True)
class Started:
    """Its model is built: it is a standby."""

    process: Process


@dataclass(frozen=True, slots=True)
class Loaded:
    step: int
    damaged: tuple[tuple[int, str], ...]
    """Checkpoints that could not be used: step, and what is wrong."""
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the bits of a run on GPUs depend on beside the program, where it is to repeat them; said
    before `Loaded`."""

    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Synced:
    step: int


@dataclass(frozen=True, slots=True)
class SyncFailed:
    reason: str
    generation: int = 0
    """Whose member it was to become; 0: it followed somebody."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The group has formed; the worker gets its part of the state."""

    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class Joined:
    generation: int
    rank: int
    state_s: float
    step: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's place in a pipeline."""

    pipeline: int
    stage: int
    blocks: tuple[int, ...]
    """The first one, and that behind the last one; of each stage, where a rank has several."""


@dataclass(frozen=True, slots=True)
class Planned:
    """How the members share the model, where workers plan it."""

    generation: int
    layout: str
    warnings: tuple[str, ...]
    stages: tuple[Stage | None, ...]
    """By rank; None is inactive."""
    moved_bytes: int = 0
    """Of the state, from one rank or holder to another, for this generation."""
    blocks: tuple[str, ...] = ()
    """Of the model, by name, in their order."""
    costs: tuple[float, ...] = ()
    """Of each block, in floating-point operations of a forward, or as the workload has them."""


@dataclass(frozen=True, slots=True)
class ScriptLevel:
    """At which level a script runs, said by the lowest rank."""

    generation: int
    level: int
    reason: str
    """Why it is no higher one; empty for the highest."""
    weights_sha256: str = ""
    """Of the script's last model in DistributedDataParallel, once it has returned."""


@dataclass(frozen=True, slots=True)
class ScriptMove:
    """Where a rank's script is."""

    generation: int
    rank: int
    waits_in: str
    """What it waits for the others in, as "report() number 4"; empty: in nothing."""
    waited_s: float
    place: str
    """Its own line, as "train.py:87"; empty if it is at none."""


@dataclass(frozen=True, slots=True)
class ScriptSteps:
    """Steps of a script's optimizers, from the lowest rank. They may be said more than once."""

    call: int
    """The generation in which the script was called that they are of."""
    base: int
    """Steps that were behind it then: later ones of calls before are done again, if they are."""
    steps: tuple[StepMetrics, ...]
    """In order."""


OfScript: TypeAlias = ScriptLevel | ScriptMove | ScriptSteps


@dataclass(frozen=True, slots=True)
class Paused:
    generation: int
    rank: int
    step: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class Suspended:
    generation: int
    rank: int
    step: int
    """-1: it holds nothing that could be said to be of a step."""
    origin: int
    prepared_by: int
    """The generation whose reduced gradients of the next step are here; 0: none are."""
    is_between_steps: bool
    vote: VoteHead | None
    """Of the last committed step; its content is the payload."""
    evaluation: Evaluation | None
    """The last one that it has completed."""
    is_copied: bool = False
    """Its state is another one's, and its loop has come to no boundary with it: what the others do
    after that step, it does not do."""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class CollectiveFailed:
    generation: int
    rank: int
    message: str
    is_refused: bool
    is_explained: bool = False
    """The loop ends the generation of its own accord: no loss is to be waited for."""
    too_few: int = 0
    """So many members have no memory for a step, which more had; 0: that is not why."""
    unanswered: str = ""
    """The host that the backend got no answer from; "": that is not why."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Steps from the lowest rank, in order, and the vote of the last one."""

    generation: int
    world_size: int
    """0: a step is on record once it is said; else once so many ranks have said `Held`."""
    steps: tuple[StepRecord, ...]
    vote: VoteHead | None
    """Its content is the payload; None: this rank has gone back, and forgot it."""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Measured:
    """Where the time of committed steps went."""

    rows: tuple[dict[str, Any], ...]
    """Lines of anatomy.jsonl, without the worker's name."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's copy of a step is held, or nobody is there to hold it."""

    generation: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Protected:
    step: int
    why: str
    """Why nobody holds this worker's newest copy; empty: one does again."""


@dataclass(frozen=True, slots=True)
class HolderSilent:
    holder: tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Said by the lowest rank."""

    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Diverged:
    """These workers' replicas differ from the majority's."""

    generation: int
    workers: tuple[int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class PartSaved:
    """A rank's part of a checkpoint is durable."""

    generation: int
    rank: int
    step: int
    payload: bytes = b""
    """A `SavedPart` (elastic/protocol/manifest.py), packed: of a large model it is large."""


@dataclass(frozen=True, slots=True)
class PartFailed:
    generation: int
    rank: int
    step: int
    message: str


@dataclass(frozen=True, slots=True)
class StillSaving:
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class Done:
    """The user's loop has returned."""

    generation: int
    rank: int
    step: int
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    generation: int
    rank: int
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class WrongInput:
    message: str
    is_unfit: bool
    """It is the node that cannot serve the run."""


@dataclass(frozen=True, slots=True)
class UserFailed:
    message: str


@dataclass(frozen=True, slots=True)
class LastWords:
    """The process ends itself."""

    why: str
    cause: str = ""
    """One of CAUSES (reports.py), where it is not that the process died."""


@dataclass(frozen=True, slots=True)
class DrainNotice:
    cause: str
    notice_s: float


Report: TypeAlias = (
    Introduction
    | Started
    | Fingerprint
    | Loaded
    | Synced
    | SyncFailed
    | Connected
    | Joined
    | Planned
    | ScriptLevel
    | ScriptMove
    | ScriptSteps
    | Paused
    | Kept
    | Suspended
    | CollectiveFailed
    | Committed
    | Measured
    | Held
    | Protected
    | HolderSilent
    | Evaluated
    | Diverged
    | PartSaved
    | PartFailed
    | StillSaving
    | Done
    | Ended
    | WrongInput
    | UserFailed
    | LastWords
    | DrainNotice
)

TO_CONTROLLER: Direction[Report] = Direction(
    *get_args(Report), parts=(Process, Evaluation, Stage, *STEP_RECORD)
)
