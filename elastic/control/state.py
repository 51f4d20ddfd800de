"""Ledger and phases of the controller: plain values, no behaviour.

What it tells its shell to do is in commands.py.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from elastic.control.commands import Command
from elastic.control.detection.patience import Costly
from elastic.control.planning import Nodes
from elastic.protocol.membership import Membership, NumberSet
from elastic.protocol.mesh import DDP, Parallel

NOBODY = NumberSet()
NOWHERE = Nodes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows; every duration derives from `detect_s` where the run is configured."""

    min_workers: int
    max_workers: int
    standby: int
    steps: int
    max_failures: int
    join_timeout_s: float
    """For the members of a generation to meet, whatever their state takes."""
    end_timeout_s: float
    """How long members that write the final state may get no further with it."""
    can_save: bool = False
    """There are checkpoints."""
    confirm_timeout_s: float
    """How long a failed collective waits for the loss that explains it."""
    cold_patience_s: float = 300.0
    """How long a phase without a usual time may take."""
    save_every_s: float | None = None
    """A committed step is saved when the last checkpoint is so old; None: never for that."""
    must_save: bool = False
    """A checkpoint that cannot be written ends the run."""
    is_whole: bool = True
    """Every member holds all of the state. Else each holds a part: what a lost one held may be in
    peer memory, as of an earlier step, or gone, and the members find out when they form."""
    has_copies: bool = False
    """Peer memory has every part of every committed step."""
    parallel: Parallel = DDP
    """The axes that the members are to make; in old journals, who planned no mesh, ddp."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that the members of `generation` write after `step` steps; generation 0: none
    is known of."""

    generation: int = 0
    step: int = 0
    saved: NumberSet = NOBODY  # ranks whose part is durable
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """What a drain notice says of one worker."""

    worker: int
    leave_at: float
    """From when on it is not kept until its replacement is ready."""
    gone_at: float
    """When it is gone: what is not saved for it by then never will be."""


@dataclass(frozen=True, slots=True)
class Saves:
    current: Save = Save()
    published_at: float = 0.0
    """When the newest checkpoint was, or the run began; with `Limits.save_every_s`."""
    asked_at: float = 0.0
    """For one of this generation; 0: not yet."""
    kept_step: int = -1
    """Saved for those who leave with a state that nobody else holds: they go no further."""


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """A worker lost with its GPU."""

    step: int
    """Committed steps then."""
    generation: int
    device: str
    """By its name, as its worker called it."""
    then: str = ""
    """Another one that has failed in a later attempt at the same step: it is not the GPUs."""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """Newcomers whose machines are unfit for a run that goes on without them."""

    in_a_row: int = 0
    """Since a newcomer has joined."""
    places: int = 0
    """So many stay empty: a replacement may come to the same machine..."""
    until: float = 0.0
    """...before this time."""


NO_DEVICE_FAULT, NOBODY_REFUSED = DeviceFault(-1, 0, ""), Refused()


@dataclass(frozen=True, slots=True)
class Losses:
    """What was lost, as far as it counts against a budget or makes the next attempt wait."""

    failures: int = 0
    """Members lost since the last committed step."""
    falls: int = 0
    """So often the run has gone back to a checkpoint since it had come furthest, to `fallen_from`:
    what crashes everybody in the same step would do so for ever."""
    fallen_from: int = -1
    in_vain: int = 0
    """Generations since the last committed step whose members could not get its state."""
    stillborn: int = 0
    """Workers in a row that died before they joined a generation; whom a run lost before it began
    to wait did not keep it from going on, and counts no more."""
    respawn_at: float = 0.0
    """No spawn before this time (back-off after stillborn workers)."""
    barred: int = 0
    """Workers lost as unreachable, or with their device: a replacement may come to the same
    place..."""
    barred_until: float = 0.0
    """...and is not asked for before this time."""
    costly: tuple[Costly, ...] = ()
    """Of steps that are not committed: whoever is there has `Limits.cold_patience_s`."""
    too_few: int = 0
    """So many members had no memory for a step, which more had: it takes more than these."""
    device_fault: DeviceFault = NO_DEVICE_FAULT
    """The first one of the step at hand."""
    refused: Refused = NOBODY_REFUSED


NO_SAVES, NO_LOSSES = Saves(), Losses()


@dataclass(frozen=True, slots=True)
class Ledger:
    """What outlives a generation. Every live worker is a member or in exactly one of these sets."""

    generation: int = 0
    step: int = 0
    """Committed steps."""
    losses: Losses = NO_LOSSES
    next_worker: int = 0
    stop: str = ""  # why the run was asked to stop; empty: it was not
    spawned: NumberSet = NOBODY  # asked for, not yet started
    standbys: NumberSet = NOBODY
    """Model built, no current state: those that are warm."""
    outdated: NumberSet = NOBODY
    """Those of `standbys` who hold an earlier state of this run: if nobody has the newest, theirs
    may be the newest there is."""
    loading: NumberSet = NOBODY
    """At most one: it reads the state the run starts from."""
    syncing: NumberSet = NOBODY  # copying the state
    synced: NumberSet = NOBODY
    """Following whom they copied it from, at most one step behind."""
    with_state: NumberSet = NOBODY
    """Not members, hold the state of `step`."""
    behind: NumberSet = NOBODY
    """Those of `with_state` one step behind who hold the reduced gradient of `step`: Form rolls
    them forward."""
    saves: Saves = NO_SAVES
    leaving: NumberSet = NOBODY
    """Alive, but under a drain notice: the next generation forms without them, if it can."""
    notices: tuple[Notice, ...] = ()
    """One of each that is leaving; that of a worker which has left is dropped with the next."""
    slow_copies: NumberSet = NOBODY
    """Called standbys whose copies a regroup has waited for in vain: none does so again, unless
    they are lost before they have the state, which says nothing of how long copies take."""
    earlier_generations: int = 0
    """The newest generation of the run's earlier launches: those of this one come after it."""
    nodes: Nodes = NOWHERE
    """Of the live workers that have said it, where the mesh depends on it."""
    origin: int = 0
    """The generation that computed `step`; 0: none of this run. Where every member holds the whole
    state, only those whose step is of this origin are members of one mesh."""
    has_vote: bool = False
    """The vote of `step` was heard: who has prepared the step can roll forward to it."""
    left: NumberSet = NOBODY
    """Those of `outdated` who hold the state of `step` after all: they left the members with it.
    If nobody else has it any more, they are members again."""
    min_workers: int = 0
    """As it was asked for while the run went on; 0: as `Limits` has it."""
    max_workers: int = 0
    recorded: int = -1
    """The newest step on record, if members hold later ones; -1: `step` is."""

    def with_losses(self, **changes: Any) -> Self:
        return replace(self, losses=replace(self.losses, **changes))

    def with_saves(self, **changes: Any) -> Self:
        return replace(self, saves=replace(self.saves, **changes))

    @property
    def recorded_step(self) -> int:
        return self.step if self.recorded < 0 else min(self.recorded, self.step)

    @property
    def num_generations(self) -> int:
        """Of this launch."""
        return self.generation - self.earlier_generations


# --- phases: what dies with a generation ----------------------------------------
@dataclass(frozen=True, slots=True)
class Waiting:
    """No generation: fewer than `min_workers` could take part."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forming:
    membership: Membership
    deadline: float
    """For all to be connected. Who gets its state after that is watched by its heartbeats: each of
    its pieces is a sign of life."""
    then_pause: bool = False
    joined: NumberSet = NOBODY  # ranks
    connected: NumberSet = NOBODY  # ranks whose groups have formed; those that joined are not here
    newcomers: NumberSet = NOBODY  # workers that have not taken part yet


@dataclass(frozen=True, slots=True)
class Running:
    membership: Membership
    done: NumberSet = NOBODY  # ranks whose loop has returned
    copying_since: float = 0.0
    """When the first of those who copy ahead was told to; 0: nobody was."""
    enter_by: float = 0.0
    """Until then who has copied ahead waits for others that still do; 0: nobody has."""


@dataclass(frozen=True, slots=True)
class Pausing:
    """Members stop at the next step boundary, by their vote all at the same one."""

    membership: Membership
    paused: NumberSet = NOBODY  # ranks
    done: NumberSet = NOBODY
    kept: NumberSet = NOBODY  # ranks that have saved the state of this boundary, if told to


@dataclass(frozen=True, slots=True)
class Camp:
    """Ranks that hold the same."""

    step: int
    """Committed steps of their state; -1: they hold none."""
    origin: int
    """The generation that computed it."""
    prepared_by: int
    """The generation whose reduced gradients of the next step they hold; -1: they hold none."""
    ranks: NumberSet


@dataclass(frozen=True, slots=True)
class Suspending:
    """A generation is given up: survivors abandon their collectives and say where they stand.

    `Ledger.step` is the highest that anybody is known to have committed.
    """

    membership: Membership
    lost: NumberSet  # workers
    deadline: float | None
    """Set while the loss that explains why the generation failed may still be reported; whoever is
    `apart` and silent by then is lost."""
    complaint: str = ""
    """What the first failed collective said."""
    is_refused: bool = False
    """It was refused: the same members would meet it again."""
    is_overdue: bool = False
    """No loss was reported in time, and not all have answered: who computes, or gets its state,
    cannot answer before its micro-batch or piece ends, and suspicion tells whether it hangs. There
    is no deadline then, and nothing explains the failure if all answer."""
    was_forming: bool = False
    """The generation had not formed: if everybody answers, it is tried again."""
    apart: NumberSet = NOBODY
    """Ranks that had not met the others by then. Forming obeys an abort at once; who had met them
    may be inside a piece of its state, or the user's code, and answers later."""
    answers: tuple[Camp, ...] = ()
    between: NumberSet = NOBODY  # ranks between steps: inside session.evaluate, or done
    copied: NumberSet = NOBODY  # ranks whose loop has not come to the step that they have copied
    called: NumberSet = NOBODY
    """Standbys that were told to copy the state, to take a lost one's place."""
    standbys_by: float = 0.0
    """Until then they may still do so."""


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


class Decision(NamedTuple):
    ledger: Ledger
    phase: Phase
    commands: tuple[Command, ...] = ()
    reason: str = ""
    """One line; empty if nothing was decided."""
