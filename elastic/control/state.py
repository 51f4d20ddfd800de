"""Ledger, phases and events of the controller: plain values, no behaviour.

What it tells its shell to do is in commands.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

from elastic.control.commands import Command
from elastic.control.standing import Standing
from elastic.protocol.membership import Membership, NumberSet

NOBODY = NumberSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows; every duration derives from `detect_s` where the run is configured."""

    min_workers: int
    max_workers: int
    standby: int
    steps: int
    max_failures: int
    join_timeout_s: float
    end_timeout_s: float
    """How long members may take to write the final state."""
    can_save: bool = False
    """There are checkpoints."""
    confirm_timeout_s: float
    """How long a failed collective waits for the loss that explains it."""
    must_save: bool = False
    """A checkpoint that cannot be written ends the run."""
    is_sharded: bool = False
    """Each member holds a part of the state only: what a lost one held may be in peer memory, as
    of an earlier step, or gone. The members find out when they form."""
    has_copies: bool = False
    """Peer memory has every part of every committed step."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that the members of `generation` write after `step` steps; generation 0: none
    is known of."""

    generation: int = 0
    step: int = 0
    saved: NumberSet = NOBODY  # ranks whose part is durable
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """What outlives a generation. Every live worker is a member or in exactly one of these sets."""

    generation: int = 0
    step: int = 0
    """Committed steps."""
    failures: int = 0  # members lost since the last committed step
    in_vain: int = 0
    """Generations since the last committed step whose members could not get its state."""
    stillborn: int = 0  # workers in a row that died before they joined a generation
    respawn_at: float = 0.0
    """No spawn before this time (back-off after stillborn workers)."""
    next_worker: int = 0
    stop: str = ""  # why the run was asked to stop; empty: it was not
    spawned: NumberSet = NOBODY  # asked for, not yet ready
    ready: NumberSet = NOBODY
    """Model built, no current state: the warm standbys."""
    outdated: NumberSet = NOBODY
    """Those of `ready` who hold an earlier state of this run: if nobody has the newest, theirs may
    be the newest there is."""
    loading: NumberSet = NOBODY
    """At most one: it reads the state the run starts from."""
    syncing: NumberSet = NOBODY  # copying state from a holder or member
    synced: NumberSet = NOBODY
    """Following a holder or member, at most one step behind."""
    holders: NumberSet = NOBODY
    """Not members, hold the state of `step`."""
    behind: NumberSet = NOBODY
    """Holders one step behind who hold the reduced gradient of `step`: Form rolls them forward."""
    save: Save = Save()
    leaving: NumberSet = NOBODY
    """Alive, but under a drain notice: the next generation forms without them, if it can."""
    leave_at: float = 0.0
    """From when on they are not kept until their replacements are ready."""
    gone_at: float = 0.0
    """When the first of them is gone: what is not saved for them by then never will be."""
    kept_step: int = -1
    """Saved for those who leave with a state that nobody else holds: they go no further."""
    is_copy_slow: bool = False
    """A regroup has waited for standbys in vain: none does so again."""


# --- phases: what dies with a generation ----------------------------------------
@dataclass(frozen=True, slots=True)
class Waiting:
    """No generation: fewer than `min_workers` could take part."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forming:
    membership: Membership
    deadline: float
    then_pause: bool = False
    joined: NumberSet = NOBODY  # ranks


@dataclass(frozen=True, slots=True)
class Running:
    membership: Membership
    done: NumberSet = NOBODY  # ranks whose loop has returned


@dataclass(frozen=True, slots=True)
class Pausing:
    """Members stop at the next step boundary, by their vote all at the same one."""

    membership: Membership
    paused: NumberSet = NOBODY  # ranks
    done: NumberSet = NOBODY
    kept: NumberSet = NOBODY  # ranks that have saved the state of this boundary, if told to


@dataclass(frozen=True, slots=True)
class Suspending:
    """A generation is given up: survivors abandon their collectives and say where they stand.

    Their steps are relative to `Ledger.step`, the highest that anybody is known to have committed.
    """

    membership: Membership
    lost: NumberSet  # workers
    deadline: float | None
    """Set while nothing explains why the generation failed; whoever is silent by then is lost."""
    complaint: str = ""
    """What the first failed collective said."""
    was_forming: bool = False
    """The generation had not formed: if everybody answers, it is tried again."""
    level: NumberSet = NOBODY  # ranks that committed `Ledger.step`
    behind: NumberSet = NOBODY  # ranks that committed one step less
    stale: NumberSet = NOBODY  # ranks further behind, or without state
    prepared: NumberSet = NOBODY  # ranks with the reduced gradient of their next step
    evaluating: NumberSet = NOBODY  # ranks inside session.evaluate
    standbys_by: float = 0.0
    """Until then those who were called to take a lost one's place may still copy the state."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Members write the final state and say its hash. If one is lost the others do it again."""

    membership: Membership
    outcome: str
    reason: str
    deadline: float
    ended: NumberSet = NOBODY  # ranks
    weights_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: str  # succeeded, failed, stopped
    reason: str
    weights_sha256: str = ""


Active = Forming | Running | Pausing | Suspending | Ending  # a generation is in progress
Phase = Waiting | Active | Finished


# --- events: what happened. `generation` is present iff a member says it ---------
@dataclass(frozen=True, slots=True)
class WorkerReady:
    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: int
    cause: str  # one of elastic.protocol.reports.CAUSES
    last_seen: float
    """The worker's last sign of life."""
    at: float
    why: str = ""
    """What was seen, in words, where the cause alone does not tell."""


@dataclass(frozen=True, slots=True)
class Loaded:
    worker: int
    step: int
    at: float


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
    """Sent by the lowest rank, repeated after a regroup if unsure. Brings the step's vote."""

    generation: int
    step: int
    step_s: float
    at: float


@dataclass(frozen=True, slots=True)
class Paused:
    generation: int
    rank: int
    step: int
    at: float


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
    is_stall: bool = False  # the controller's word: all wait, and no loss will explain it


@dataclass(frozen=True, slots=True)
class Suspended:
    """Every member's answer to Abort, newcomers included. Brings its last vote."""

    generation: int
    rank: int
    step: int
    """Committed steps of its state; -1: it holds none."""
    is_prepared: bool
    """Holds the reduced gradient of `step` + 1."""
    is_evaluating: bool
    at: float


@dataclass(frozen=True, slots=True)
class Done:
    """The rank's training loop has returned after `step` committed steps."""

    generation: int
    rank: int
    step: int
    at: float


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
    Joined
    | Committed
    | Paused
    | Kept
    | CollectiveFailed
    | Suspended
    | Done
    | Ended
    | PartSaved
    | PartFailed
)
Event = (
    WorkerReady
    | WorkerLost
    | Loaded
    | Synced
    | SyncFailed
    | Adopted
    | DrainNotice
    | StopRequested
    | UserFailed
    | Cancelled
    | Report
    | Tick
)


class Decision(NamedTuple):
    ledger: Ledger
    phase: Phase
    commands: tuple[Command, ...] = ()
    reason: str = ""
    """One line; empty if nothing was decided."""
