"""Where the run's time went: goodput, badput and the phases of each recovery, for `result.json`.

A pure fold over the journal's events and decisions; what the numbers mean is below.

Every second of the run is in exactly one place. The time up to a new committed step is goodput, but
for the mean of what its members wait for each other in it, which is "idle"; all other time goes to
the bucket of the phase it was spent in. Steps that the run falls back behind take their (mean) time
from goodput to "rolled_back".

Losses between the first and the next committed step are one recovery: cause and detection are the
first one's, "fence" lasts until the last Form before that step and so contains attempts that were
given up. Waiting for enough workers, or for one of them to have the state, belongs to "form".

Of a script that goes on in place its own steps count: they are kept, committed or not. Of one that
is called again only what it has reported does, which is what is committed.

A step that was committed before its generation was given up, but is told later (its controller had
died), is work of then, and no first step after the loss.
"""

from dataclasses import dataclass, replace
from typing import Literal

from elastic.control.events import (
    Adopted,
    Committed,
    Event,
    Joined,
    Loaded,
    Stepped,
    Tick,
    WorkerLost,
)
from elastic.control.pool import is_member
from elastic.control.recovery import given_up
from elastic.control.state import (
    Active,
    Decision,
    Ending,
    Finished,
    Forming,
    Pausing,
    Phase,
    Running,
    Suspending,
    Waiting,
)

Bucket = Literal[
    "starting", "waiting", "recovering", "retried", "growing", "idle", "rolled_back", "ending"
]
BUCKETS: tuple[Bucket, ...] = (
    "starting",  # until the first committed step's generation has formed
    "waiting",  # fewer than min workers
    "recovering",  # from a worker's last sign of life until the survivors have formed
    "retried",  # work on a step that was given up and done again
    "growing",  # pausing and forming with newcomers
    "idle",  # in steps, while a member waits for slower ones or for those with more to compute
    "rolled_back",  # steps that were committed and then lost with all who had them
    "ending",  # after the last step
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery, in seconds: its five phases add up to `total_s`."""

    cause: str
    detect_s: float
    fence_s: float
    form_s: float
    state_s: float
    first_step_s: float
    total_s: float
    lost_steps: int
    waiting_s: float = 0.0
    """Part of `form_s`: for enough workers, and for one of them to have the state."""


@dataclass(frozen=True, slots=True)
class Healing:
    """A recovery in progress."""

    cause: str
    last_seen: float
    lost_at: float
    form_at: float | None = None
    formed_at: float | None = None
    state_s: float = 0.0
    lost_steps: int = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A time that went to `bucket` when a generation was given up. Reports of steps that it had
    committed may come later: the time is theirs, from `began` on."""

    bucket: Bucket = "retried"
    began: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Account:
    began: float
    since: float
    """All time before this is in `goodput_s` or in `badput`."""
    goodput_s: float = 0.0
    badput: tuple[tuple[Bucket, float], ...] = tuple((bucket, 0.0) for bucket in BUCKETS)
    first_step: int = 0
    """Committed steps that this run began with."""
    step: int = 0
    """The last line of metrics.jsonl."""
    lost_steps: int = 0
    recoveries: tuple[Recovery, ...] = ()
    healing: Healing | None = None
    given_up: GivenUp = GivenUp()

    @property
    def wall_s(self) -> float:
        return self.since - self.began

    @property
    def goodput(self) -> float:
        """The part of the wall time spent on steps that stayed committed."""
        return self.goodput_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def badput_s(self) -> dict[str, float]:
        return {bucket: seconds for bucket, seconds in self.badput if seconds > 0}


def open_account(at: float) -> Account:
    return Account(began=at, since=at)


def account(so_far: Account, event: Event, before: Decision, decision: Decision) -> Account:
    """Add what `event` did to a run as it was `before`. Ticks without news may be left out."""
    phase, generation = before.phase, before.ledger.generation
    if isinstance(phase, Finished):
        return so_far
    now = max(event.at, so_far.since)
    entry = hear_loss(so_far, event, phase, now)
    is_first = generation == decision.ledger.earlier_generations
    if isinstance(event, Loaded) and isinstance(phase, Waiting) and is_first:
        entry = replace(entry, first_step=event.step, step=event.step)
    if decision.ledger.step < entry.step:
        entry = roll_back(entry, decision.ledger.step)
    has_stepped = False
    if isinstance(event, Committed) and is_new_step(entry, event, phase, generation):
        has_stepped = event.step > before.ledger.step
        entry = replace(entry, step=event.step)
        if not has_stepped:
            entry = hear_late(entry, event.step_s)
        if isinstance(phase, Running | Pausing):
            entry = take_step(entry, event, now)
    is_at_work = isinstance(phase, Running | Pausing)
    if isinstance(event, Stepped) and event.generation == generation and is_at_work:
        has_stepped, entry = True, take_time(entry, now)
    if type(decision.phase) is not type(phase) or decision.ledger.generation != generation:
        entry = leave_phase(entry, event, phase, decision.phase, now)
    return heal(entry, event, decision, has_stepped, now)


def take_step(entry: Account, event: Committed, now: float) -> Account:
    """The time since what was before is the step's: work, but for what members wait in it."""
    idle_s = min(max(0.0, event.idle_s), now - entry.since)
    return take_time(entry, now, idle_s)


def take_time(entry: Account, now: float, idle_s: float = 0.0) -> Account:
    """It was work, but for so much of it."""
    goodput_s = entry.goodput_s + (now - entry.since) - idle_s
    entry = replace(entry, goodput_s=goodput_s, since=now)
    return spend(entry, "idle", idle_s) if idle_s else entry


def spend(entry: Account, bucket: Bucket, seconds: float) -> Account:
    badput = tuple((b, s + seconds if b == bucket else s) for b, s in entry.badput)
    return replace(entry, badput=badput)


def losses_in(event: Event, phase: Phase) -> tuple[WorkerLost, ...]:
    """The losses that an event tells of, some in no words: members whom a new controller does not
    find, and those who did not join it, nor answer in time that it is given up."""
    match event, phase:
        case WorkerLost(), _:
            return (event,)
        case Adopted(standings=standings, at=at), _ if isinstance(phase, Active):
            found = {s.worker for s in standings}
            gone, cause = (w for w in phase.membership.workers if w not in found), "process_died"
        case Tick(at=at), Suspending(deadline=deadline) if deadline and at >= deadline:
            gone, cause = given_up(phase), "join_timeout"
        case _:
            return ()
    return tuple(WorkerLost(w, cause, at, at) for w in gone if is_member(phase, w))


def hear_loss(entry: Account, event: Event, phase: Phase, now: float) -> Account:
    lost = [loss for loss in losses_in(event, phase) if is_member(phase, loss.worker)]
    if not lost or isinstance(phase, Ending) or entry.healing:
        return entry
    last_seen = min(max(lost[0].last_seen, entry.began), now)
    if isinstance(event, Adopted):  # nobody had looked: all that is known are the steps
        last_seen = entry.since
    return replace(entry, healing=Healing(lost[0].cause, last_seen, now))


def is_new_step(entry: Account, event: Committed, phase: Phase, generation: int) -> bool:
    """A new line of metrics.jsonl, not one repeated after a regroup or said too late."""
    is_current = isinstance(phase, Active) and event.generation == generation
    return is_current and event.step > entry.step


def hear_late(entry: Account, step_s: float) -> Account:
    """A step had been committed before its generation was given up: that was work. Whoever was lost
    had lived until then, where a controller's death has hidden its last sign of life."""
    given_up, healing = entry.given_up, entry.healing
    seconds = max(0.0, min(step_s, given_up.ended - given_up.began))
    if healing and given_up.bucket == "recovering":
        healing = replace(healing, last_seen=min(healing.lost_at, healing.last_seen + seconds))
    return replace(
        spend(entry, given_up.bucket, -seconds),
        goodput_s=entry.goodput_s + seconds,
        given_up=replace(given_up, began=given_up.began + seconds),
        healing=healing,
    )


def roll_back(entry: Account, step: int) -> Account:
    num_lost, num_done = entry.step - step, entry.step - entry.first_step
    seconds = entry.goodput_s * num_lost / num_done if num_done > 0 else 0.0
    entry = spend(entry, "rolled_back", seconds)
    healing = entry.healing
    if healing:
        healing = replace(healing, lost_steps=healing.lost_steps + num_lost)
    return replace(
        entry,
        goodput_s=entry.goodput_s - seconds,
        first_step=min(entry.first_step, step),
        step=step,
        lost_steps=entry.lost_steps + num_lost,
        healing=healing,
    )


def leave_phase(entry: Account, event: Event, phase: Phase, next_: Phase, now: float) -> Account:
    """Attribute the time since the last committed step or change of phase."""
    match phase, next_:
        case Running(), Pausing():
            return entry  # the step goes on
        case Forming(), (Running() | Pausing() | Ending()):
            bucket = forming_bucket(entry)
        case Forming(), _:
            bucket = "recovering" if entry.step > entry.first_step else "starting"
        case Waiting(), _:
            bucket = "waiting" if entry.healing or entry.step > entry.first_step else "starting"
            entry = wait_healing(entry, now)
        case ((Running() | Pausing()), (Suspending() | Waiting() | Finished())):
            return give_up_step(entry, event, phase, now)
        case Pausing(), Forming():
            bucket = forming_bucket(entry)
        case ((Running() | Pausing() | Ending()), _):
            bucket = "ending"
        case _:
            bucket = "recovering"
    if isinstance(event, Adopted):  # the journal does not say what was done meanwhile
        entry = replace(entry, given_up=GivenUp(bucket, entry.since, now))
    return replace(spend(entry, bucket, now - entry.since), since=now)


def wait_healing(entry: Account, now: float) -> Account:
    """A recovery has waited for capacity until now."""
    if entry.healing is None:
        return entry
    waiting_s = entry.healing.waiting_s + now - entry.since
    return replace(entry, healing=replace(entry.healing, waiting_s=waiting_s))


def forming_bucket(entry: Account) -> Bucket:
    if entry.healing:
        return "recovering"
    return "growing" if entry.step > entry.first_step else "starting"


def give_up_step(entry: Account, event: Event, phase: Phase, now: float) -> Account:
    """A step was under way: until the lost worker's last sign of life it was work."""
    silent_since, given_up = now, GivenUp("retried", entry.since, now)
    if isinstance(event, WorkerLost):
        silent_since = min(max(event.last_seen, entry.since), now)
        given_up = GivenUp("retried", entry.since, silent_since)
    elif isinstance(event, Adopted) and losses_in(event, phase):
        silent_since, given_up = entry.since, GivenUp("recovering", entry.since, now)
    entry = spend(entry, "retried", silent_since - entry.since)
    return replace(spend(entry, "recovering", now - silent_since), since=now, given_up=given_up)


def heal(
    entry: Account, event: Event, decision: Decision, has_stepped: bool, now: float
) -> Account:
    """Follow the recovery in progress; it ends with a step of its generation, or with the run."""
    healing, phase = entry.healing, decision.phase
    if healing is None:
        return entry
    if isinstance(event, Joined) and event.generation == decision.ledger.generation:
        healing = replace(healing, state_s=max(healing.state_s, event.state_s))
    if isinstance(phase, Forming):
        if healing.form_at is None:
            healing = replace(healing, form_at=now)
    elif isinstance(phase, Running | Pausing):
        if healing.formed_at is None:
            healing = replace(healing, formed_at=now)
    elif isinstance(phase, Suspending | Waiting):  # given up again, or never formed
        healing = replace(healing, form_at=None, formed_at=None, state_s=0.0)
    is_healed = has_stepped and isinstance(phase, Running | Pausing)
    if is_healed or isinstance(phase, Ending | Finished):
        return close(entry, healing, now)
    return replace(entry, healing=healing)


def close(entry: Account, healing: Healing, now: float) -> Account:
    form_at = max(healing.lost_at, now if healing.form_at is None else healing.form_at)
    formed_at = max(form_at, now if healing.formed_at is None else healing.formed_at)
    state_s = min(healing.state_s, formed_at - form_at)
    waiting_s = min(healing.waiting_s, form_at - healing.lost_at)
    recovery = Recovery(
        cause=healing.cause,
        detect_s=healing.lost_at - healing.last_seen,
        fence_s=form_at - healing.lost_at - waiting_s,
        form_s=formed_at - form_at - state_s + waiting_s,
        state_s=state_s,
        first_step_s=max(0.0, now - formed_at),
        total_s=max(formed_at, now) - healing.last_seen,
        lost_steps=healing.lost_steps,
        waiting_s=waiting_s,
    )
    return replace(entry, recoveries=(*entry.recoveries, recovery), healing=None)
