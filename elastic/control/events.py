"""Events of the controller: what happened. `generation` is present iff a member says it.

translation.py makes them of what members report.
"""

from dataclasses import dataclass

from elastic.control.detection.patience import PhaseOfStep
from elastic.control.standing import Standing


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    worker: int
    at: float
    node: str = ""
    """In Ray's words; "" in old journals."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: int
    cause: str  # one of elastic.protocol.reports.CAUSES
    last_seen: float
    """The worker's last sign of life."""
    at: float
    why: str = ""
    """What was seen, in words, where the cause alone does not tell."""
    slow_in: PhaseOfStep | None = None
    """It was only taken for hung because of its time there."""


@dataclass(frozen=True, slots=True)
class Loaded:
    worker: int
    step: int
    at: float
    origin: int = 0
    """The generation that computed the step; 0: none of this run, or in old journals."""


@dataclass(frozen=True, slots=True)
class Synced:
    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class SyncFailed:
    """The worker's source is gone or went too far ahead: it needs another Sync."""

    worker: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """A controller died; this is its successor's first event. Whoever lives has said where it
    stands, and what others knew of it, or were told to do, may never have happened."""

    standings: tuple[Standing, ...]
    """By worker; whoever is not among them counts as lost or never started."""
    at: float
    newest: int = -1
    """The highest number that Ray knows an actor by, even if it has not said a word."""
    recorded: int = -1
    """The newest step on record; -1 in old journals."""


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A live worker, member or not, will be gone by `deadline`: no loss, and no failure."""

    worker: int
    cause: str
    deadline: float
    at: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Resized:
    """From outside: the run is to have another number of workers."""

    min_workers: int
    max_workers: int
    at: float


@dataclass(frozen=True, slots=True)
class Connected:
    """The rank's groups have formed, and so have all others of its generation. Until it has joined
    it gets its part of a sharded state, which takes as long as the state is large."""

    generation: int
    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class Joined:
    generation: int
    rank: int
    state_s: float
    """Seconds spent on bringing its state to the step of the generation."""
    at: float
    step: int = 0
    """Committed steps of its state; where it is sharded, they may be fewer than Form said: the
    members go on with the newest state that they can put together. 0 in old journals."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Sent by the lowest rank, repeated after a regroup if unsure."""

    generation: int
    step: int
    step_s: float
    at: float
    origin: int = 0
    """The generation that computed the step; 0 in old journals."""
    has_vote: bool = True
    idle_s: float = 0.0
    """Of `step_s` a member waited so long for slower ones, the mean over members."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A script's optimizers have stepped, in a step of ours that is open. It decides nothing: where
    the run's time goes is told by it (accounting.py)."""

    generation: int
    at: float


@dataclass(frozen=True, slots=True)
class Paused:
    generation: int
    rank: int
    step: int
    at: float
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """The answer to Keep, after PartSaved or PartFailed."""

    generation: int
    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class CollectiveFailed:
    generation: int
    rank: int
    message: str
    at: float
    is_stall: bool = False
    """No loss will explain it: all wait, or the loop ends the generation of its own accord."""
    is_refused: bool = False
    """The backend refused the call itself, which no connection explains."""
    too_few: int = 0
    """So many members have no memory for a step, which more had; 0: that is not why."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """Every member's answer to Abort, newcomers included."""

    generation: int
    rank: int
    step: int
    """Committed steps of its state; -1: it holds none."""
    is_prepared: bool
    """Holds the reduced gradient of `step` + 1."""
    is_between_steps: bool
    """Inside session.evaluate, or its loop has returned: takes nobody in before its next step."""
    at: float
    origin: int = 0
    """The generation that computed `step`: two may have computed it, with other bits."""
    prepared_by: int = 0
    """The generation that computed that gradient."""
    is_copied: bool = False
    """It has copied its state, and has taken part in nothing since."""
    has_vote: bool = True
    """It has brought the vote of `step`; it knows none of a state that was loaded."""


@dataclass(frozen=True, slots=True)
class Done:
    """The rank's training loop has returned after `step` committed steps."""

    generation: int
    rank: int
    step: int
    at: float
    origin: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    generation: int
    rank: int
    weights_sha256: str
    at: float


@dataclass(frozen=True, slots=True)
class PartSaved:
    """The rank's part of the checkpoint of `step` is durable."""

    generation: int
    rank: int
    step: int
    at: float


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The rank cannot write its part: the storage is full, away, or refuses."""

    generation: int
    rank: int
    step: int
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class StillSaving:
    """The rank writes the final state, and has come further with it since it last said so."""

    generation: int
    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class UserFailed:
    """The user's code raised in a worker, member or not: the run ends."""

    worker: int
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The run ends at once: a second Ctrl-C, the driver's death, storage that must not fail."""

    outcome: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    at: float


Report = (
    Connected
    | Joined
    | Committed
    | Paused
    | Kept
    | CollectiveFailed
    | Suspended
    | Done
    | Ended
    | PartSaved
    | PartFailed
    | StillSaving
)
Event = (
    WorkerStarted
    | WorkerLost
    | Loaded
    | Synced
    | SyncFailed
    | Adopted
    | DrainNotice
    | StopRequested
    | Resized
    | UserFailed
    | Cancelled
    | Stepped
    | Report
    | Tick
)
