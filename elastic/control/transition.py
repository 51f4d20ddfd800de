"""The controller as a function: what happened in, what to do out.

This file is the table of (phase, event) pairs and the fence; the decisions themselves are in
scaling.py, recovery.py and shutdown.py.
"""

from dataclasses import replace
from typing import get_args

from elastic.control.checkpointing import (
    ask_to_save,
    count_from,
    has_failed,
    hear_failed_part,
    hear_part,
    publish_if_whole,
)
from elastic.control.commands import Keep, Retire, Spawn
from elastic.control.events import (
    Adopted,
    Cancelled,
    CollectiveFailed,
    Committed,
    Connected,
    Done,
    DrainNotice,
    Ended,
    Event,
    Joined,
    Kept,
    Loaded,
    PartFailed,
    PartSaved,
    Paused,
    Report,
    Resized,
    Stepped,
    StillSaving,
    StopRequested,
    Suspended,
    Synced,
    SyncFailed,
    Tick,
    UserFailed,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.failover import adopt
from elastic.control.planning import wants_nodes
from elastic.control.pool import (
    commit,
    explain,
    is_in_pool,
    is_member,
    lost_members,
    move,
    record,
    top_up,
)
from elastic.control.recovery import (
    abort_arrival,
    abort_late,
    apart,
    expire,
    hear_answer,
    hear_complaint,
    learn_step,
    lose_member,
    lose_outsider,
    settle,
    suspect_loss,
)
from elastic.control.resizing import in_force, resize
from elastic.control.scaling import (
    formed,
    has_time,
    leavers_of,
    must_keep,
    regroup,
    staff,
    stop_running,
)
from elastic.control.shutdown import end, end_late, finish, hear_end, lose_at_end
from elastic.control.state import (
    NOBODY,
    Active,
    Decision,
    Ending,
    Finished,
    Forming,
    Ledger,
    Limits,
    Notice,
    Pausing,
    Phase,
    Running,
    Suspending,
    Waiting,
)
from elastic.protocol.membership import NumberSet, worker_name, workers_from_to

LATE = "said before it saw the Abort; its Suspended tells the same"
FORMED = "somebody was through the rendezvous, so all were"
OVER = "the run is over"
AGAIN = "said again over another connection"
IGNORED: dict[tuple[type, type], str] = {
    (Running, Joined): FORMED,
    (Pausing, Joined): FORMED,
    (Running, Connected): FORMED,
    (Pausing, Connected): FORMED,
    (Suspending, Paused): LATE,
    (Suspending, Done): LATE,
    (Suspending, Kept): LATE,
    (Suspending, StillSaving): LATE,
    (Ending, Connected): AGAIN,
    (Ending, Joined): AGAIN,
    (Ending, Paused): AGAIN,
    (Ending, Kept): AGAIN,
    (Ending, Done): AGAIN,
    (Ending, StopRequested): "it is ending",
    (Ending, Resized): "it is ending",
    (Finished, StopRequested): OVER,
    (Finished, Resized): OVER,
    (Finished, Cancelled): OVER,
    (Finished, Tick): OVER,
    **{(phase, Stepped): "it says where time goes" for phase in get_args(Phase)},
}
"""Pairs that carry no news, and why. Everything else must have a case."""


class UnexpectedEvent(Exception):
    """A (phase, event) pair nobody thought of: a bug in this module or in a worker."""


def start(limits: Limits, at: float, earlier_generations: int = 0) -> Decision:
    """earlier_generations: the newest one of the run directory, 0 if it has none."""
    num_workers = limits.max_workers + limits.standby
    workers = tuple(range(num_workers))
    ledger = Ledger(
        generation=earlier_generations,
        earlier_generations=earlier_generations,
        next_worker=num_workers,
        spawned=NumberSet.of(workers),
    )
    ledger = count_from(ledger, at, limits)
    reason = f"the run starts: {workers_from_to(limits.min_workers, limits.max_workers)}"
    return top_up(Decision(ledger, Waiting("starting"), (Spawn(workers),), reason), at, limits)


def transition(ledger: Ledger, phase: Phase, event: Event, limits: Limits) -> Decision:
    """The table, by who speaks. Raises UnexpectedEvent."""
    if is_stale(ledger, phase, event) or (type(phase), type(event)) in IGNORED:
        return Decision(ledger, phase)
    limits = in_force(ledger, limits)
    match event:
        case WorkerLost() | CollectiveFailed() | Suspended():
            return hear_loss(ledger, phase, event, limits)
        case WorkerStarted() | Loaded() | Synced() | SyncFailed():
            return hear_newcomer(ledger, phase, event, limits)
        case Connected() | Joined() | Committed() | Paused() | Kept() | Done():
            return hear_member(ledger, phase, event, limits)
        case PartSaved() | PartFailed() | StillSaving() | Ended():
            return hear_saving(ledger, phase, event, limits)
        case _:
            return hear_outside(ledger, phase, event, limits)


def hear_loss(  # noqa: C901
    ledger: Ledger, phase: Phase, event: WorkerLost | CollectiveFailed | Suspended, limits: Limits
) -> Decision:
    """Of a worker, or of a generation; and what its members answer."""
    match phase, event:
        case _, WorkerLost(worker=w) if is_in_pool(ledger, w):
            without = lose_outsider(ledger, phase, event, limits)
            if isinstance(without.phase, Suspending):
                return settle(without, event.at, limits)
            return without
        case ((Forming() | Running() | Pausing() | Suspending()), WorkerLost()):
            return lose_member(ledger, phase, event, limits)
        case Ending(), WorkerLost() if not limits.is_whole:
            return lose_member(ledger, phase, event, limits)
        case Ending(), WorkerLost(worker=w, at=at):
            return lose_at_end(ledger, phase, w, at, limits)
        case ((Forming() | Running() | Pausing()), CollectiveFailed()):
            return suspect_loss(ledger, phase, event, limits)
        case Ending(), CollectiveFailed() if not limits.is_whole:
            return suspect_loss(ledger, phase, event, limits)
        case Ending(), CollectiveFailed():
            return Decision(ledger, phase)  # every member has left its last step
        case Suspending(), CollectiveFailed():
            return hear_complaint(ledger, phase, event, limits)
        case Suspending(), Suspended():
            return hear_answer(ledger, phase, event, limits)
        case _:
            raise UnexpectedEvent(phase, event)


def hear_newcomer(  # noqa: C901
    ledger: Ledger,
    phase: Phase,
    event: WorkerStarted | Loaded | Synced | SyncFailed,
    limits: Limits,
) -> Decision:
    """A worker outside the generation, or one that is let in."""
    match phase, event:
        case _, WorkerStarted(worker=w, at=at) if w in ledger.spawned:
            ledger = replace(
                ledger, spawned=ledger.spawned.remove(w), standbys=ledger.standbys.add(w)
            )
            if wants_nodes(limits.parallel):
                ledger = replace(ledger, nodes=ledger.nodes.add(w, event.node))
            return staff(ledger, phase, at, limits)
        case _, WorkerStarted(worker=w) if is_in_pool(ledger, w) or is_member(phase, w):
            return Decision(ledger, phase)  # it has introduced itself to a new controller already
        case _, WorkerStarted(worker=w):
            why = f"{worker_name(w)} is no part of the run any more"
            return Decision(ledger, phase, (Retire((w,)),), why)
        case _, Loaded():
            return hear_loaded(ledger, phase, event, limits)
        case _, Synced(worker=w, at=at):
            ledger = replace(ledger, syncing=ledger.syncing.remove(w), synced=ledger.synced.add(w))
            if isinstance(phase, Suspending):
                return settle(Decision(ledger, phase), at, limits)
            return staff(ledger, phase, at, limits)
        case _, SyncFailed(worker=w) if w in ledger.syncing or w in ledger.synced:
            had_synced = w in ledger.synced
            ledger = move(ledger, w)
            ledger = replace(ledger, standbys=ledger.standbys.add(w))
            if had_synced:
                ledger = replace(ledger, outdated=ledger.outdated.add(w))
            if isinstance(phase, Suspending):
                return settle(Decision(ledger, phase), event.at, limits)
            return Decision(ledger, phase)  # the next Tick finds a source: this one may be dead
        case ((Forming() | Running() | Pausing()), SyncFailed(worker=w, reason=reason)):
            return abort_arrival(ledger, phase, w, reason)
        case _:
            raise UnexpectedEvent(phase, event)


def hear_member(  # noqa: C901
    ledger: Ledger,
    phase: Phase,
    event: Connected | Joined | Committed | Paused | Kept | Done,
    limits: Limits,
) -> Decision:
    """How far a generation has come."""
    match phase, event:
        case Suspending(), (Connected(rank=rank) | Joined(rank=rank)):  # before it saw the Abort
            return Decision(ledger, replace(phase, apart=phase.apart.remove(rank)))
        case Suspending(), Committed(step=step, at=at) as committed:
            ledger = record(learn_step(ledger, committed, limits), step)
            return publish_if_whole(Decision(ledger, phase), at, limits)
        case Forming(), Connected(rank=rank):
            return Decision(ledger, replace(phase, connected=phase.connected.add(rank)))
        case Forming(), Joined(rank=rank, step=step, at=at):
            joined, connected = phase.joined.add(rank), phase.connected.remove(rank)
            if not limits.is_whole:  # all find the same
                ledger = record(replace(ledger, step=step), ledger.recorded_step)
            if len(joined) < phase.membership.world_size:
                return Decision(ledger, replace(phase, joined=joined, connected=connected))
            return formed(ledger, phase, at, limits)
        case Forming(), (Committed() | Paused() | Done()):  # one is through, all are
            before = formed(ledger, phase, event.at, limits)
            after = transition(before.ledger, before.phase, event, limits)
            commands = (*before.commands, *after.commands)
            return explain(before.reason, after)._replace(commands=commands)
        case ((Running() | Pausing() | Ending()), Committed(step=step, at=at) as done):
            if step <= ledger.step:  # repeated after a regroup: no progress
                return publish_if_whole(Decision(record(ledger, step), phase), at, limits)
            ledger = record(commit(ledger, step, done.origin, has_vote=done.has_vote), step)
            return ask_to_save(publish_if_whole(Decision(ledger, phase), at, limits), at, limits)
        case Running(), Paused(rank=rank) as left:
            # only a vote pauses, so all members will
            pausing = Pausing(phase.membership, NumberSet.of((rank,)), phase.done)
            why = "the members pause, as a controller before this one has asked"
            return explain(why, left_step(ledger, pausing, left, limits))
        case Pausing(), Paused(rank=rank) as left:
            paused = replace(phase, paused=phase.paused.add(rank))
            return left_step(ledger, paused, left, limits)
        case Pausing(), Kept(rank=rank, at=at):
            kept = replace(phase, kept=phase.kept.add(rank))
            if len(kept.kept) < phase.membership.world_size:
                return Decision(ledger, kept)
            if not has_failed(ledger):
                ledger = ledger.with_saves(kept_step=ledger.step)
            return leave_boundary(ledger, kept, at, limits)
        case ((Running() | Pausing()), Done(rank=rank) as left):
            done = replace(phase, done=phase.done.add(rank))
            return left_step(ledger, done, left, limits)
        case _:
            raise UnexpectedEvent(phase, event)


def hear_saving(
    ledger: Ledger,
    phase: Phase,
    event: PartSaved | PartFailed | StillSaving | Ended,
    limits: Limits,
) -> Decision:
    """What is saved: of a checkpoint, or at the end."""
    match phase, event:
        case Suspending(), Ended() if not limits.is_whole:
            return Decision(ledger, phase)  # said before another was lost: all will say it again
        case Ending(), StillSaving(at=at):
            deadline = max(phase.deadline, at + limits.end_timeout_s)
            return Decision(ledger, replace(phase, deadline=deadline))
        case Ending() as ending, Ended() as ended:
            return hear_end(ledger, ending, ended)
        case _, PartSaved() as part if isinstance(phase, Active):
            return hear_part(ledger, phase, part, limits)
        case _, PartFailed(step=step, message=message) as part if isinstance(phase, Active):
            if limits.must_save:
                why = f"the checkpoint of step {step} failed: {message}"
                return finish(ledger, phase, "failed", why)
            return hear_failed_part(ledger, phase, part)
        case _:
            raise UnexpectedEvent(phase, event)


def hear_outside(  # noqa: C901
    ledger: Ledger,
    phase: Phase,
    event: Adopted
    | DrainNotice
    | StopRequested
    | Resized
    | UserFailed
    | Cancelled
    | Stepped
    | Tick,
    limits: Limits,
) -> Decision:
    """The user, the clock, a node, the controller before this one."""
    match phase, event:
        case _, DrainNotice():
            return hear_notice(ledger, phase, event, limits)
        case _, Adopted() as adopted:
            return adopt(ledger, phase, adopted, limits)
        case Waiting(), StopRequested(reason=reason, at=at):
            survivors, rollers = tuple(ledger.with_state), ledger.behind
            ledger = replace(ledger, stop=reason, with_state=NOBODY, behind=NOBODY)
            return regroup(ledger, survivors, rollers, False, at, limits)
        case ((Forming() | Suspending() | Pausing()), StopRequested(reason=reason)):
            stop = ledger.stop or reason
            return Decision(replace(ledger, stop=stop), phase, (), f"stop asked for: {reason}")
        case Running() as running, StopRequested(reason=reason):
            return stop_running(replace(ledger, stop=ledger.stop or reason), running)
        case _, Resized() as resized:
            return resize(ledger, phase, resized, limits)
        case _, UserFailed(worker=w, message=message):
            return finish(ledger, phase, "failed", f"{worker_name(w)}: {message}")
        case _, Cancelled(outcome=outcome, reason=reason):
            return finish(ledger, phase, outcome, reason)
        case Forming(deadline=deadline) as late, Tick(at=at) if at >= deadline and apart(late):
            return abort_late(ledger, late, at, limits)
        case Suspending(deadline=deadline) as failed, Tick(at=at) if deadline and at >= deadline:
            return expire(ledger, failed, at, limits)
        case Suspending(standbys_by=by), Tick(at=at) if by:
            return settle(Decision(ledger, phase), at, limits)
        case Pausing() as late, Tick(at=at) if is_keeping(late) and is_too_late(ledger, late, at):
            why = f"the state of step {ledger.step} was not saved before its holders are gone"
            return explain(why, leave_boundary(ledger, late, at, limits))
        case Ending(deadline=deadline) as ending, Tick(at=at) if at >= deadline:
            return end_late(ledger, ending)
        case Ending(), Tick():
            return Decision(ledger, phase)
        case _, Tick(at=at):
            return top_up(staff(ledger, phase, at, limits), at, limits)
        case _:
            raise UnexpectedEvent(phase, event)


def is_stale(ledger: Ledger, phase: Phase, event: Event) -> bool:
    """The one fence: news from a generation or a worker that is no part of the run is no news."""
    if isinstance(event, Report):
        if not isinstance(phase, Active) or event.generation != phase.membership.generation:
            return True
        if isinstance(event, Committed) or not isinstance(phase, Suspending | Ending):
            return False  # a step that a lost member has committed is committed
        return phase.membership.workers[event.rank] in lost_members(phase)
    match event:
        case DrainNotice(worker=w, deadline=deadline) if w in ledger.leaving:
            return any(n.worker == w and n.gone_at <= deadline for n in ledger.notices)
        case WorkerLost(worker=w) | UserFailed(worker=w) | DrainNotice(worker=w):
            return not is_in_pool(ledger, w) and not is_member(phase, w)
        case Loaded(worker=w):
            return w not in ledger.loading
        case Synced(worker=w):
            return w not in ledger.syncing
        case SyncFailed(worker=w):
            may_step = isinstance(phase, Forming | Running | Pausing) and is_member(phase, w)
            return w not in ledger.syncing and w not in ledger.synced and not may_step
        case _:
            return False


def hear_loaded(ledger: Ledger, phase: Phase, event: Loaded, limits: Limits) -> Decision:
    """The first with the state. Whoever copied from a former one copies again from it."""
    losses = ledger.losses
    if event.step < ledger.step and losses.failures:  # drains alone never count
        fallen_from = max(ledger.step, losses.fallen_from) if losses.falls else ledger.step
        losses = replace(losses, falls=losses.falls + 1, fallen_from=fallen_from)
        ledger = replace(ledger, losses=losses)
    if losses.falls > limits.max_failures:
        why = (
            f"{losses.falls} times since step {losses.fallen_from} was committed nobody was left "
            f"who held the state, now back to step {event.step}; max_failures is "
            f"{limits.max_failures}; if the same step ends all workers, their logs tell why"
        )
        return finish(ledger, phase, "failed", why)
    with_state = NumberSet.of((event.worker,))
    others = ledger.standbys | ledger.syncing | ledger.synced
    ledger = replace(
        ledger,
        step=event.step,
        origin=event.origin,
        has_vote=False,
        recorded=-1,
        loading=NOBODY,
        standbys=others,
        outdated=NOBODY,
        left=NOBODY,
        syncing=NOBODY,
        synced=NOBODY,
        with_state=with_state,
    )
    reason = f"{worker_name(event.worker)} holds the state of step {event.step}"
    return explain(reason, staff(ledger, phase, event.at, limits))


def hear_notice(ledger: Ledger, phase: Phase, event: DrainNotice, limits: Limits) -> Decision:
    """A planned shrink: the worker trains on until the next generation forms without it.

    Half of the notice is for its replacement to come, the other half for long steps.
    """
    notice_s = max(0.0, event.deadline - event.at)
    notice = Notice(event.worker, event.at + notice_s / 2, event.deadline)
    others = (n for n in ledger.notices if n.worker in ledger.leaving and n.worker != event.worker)
    leaving = ledger.leaving.add(event.worker)
    ledger = replace(ledger, leaving=leaving, notices=(*others, notice))
    reason = f"{worker_name(event.worker)} will leave within {notice_s:.0f} s ({event.cause})"
    if isinstance(phase, Ending):
        return Decision(ledger, phase, (), reason)
    return explain(reason, top_up(staff(ledger, phase, event.at, limits), event.at, limits))


def left_step(
    ledger: Ledger, phase: Running | Pausing, event: Paused | Done, limits: Limits
) -> Decision:
    """A rank has paused or is done; when all are, there is a next generation or an end.

    Until then its word alone does not commit the step: unlike Committed it brings no vote. The
    lowest rank has said before what it has committed; of a state in parts, its copies
    may not all be held.
    """
    membership, at = phase.membership, event.at
    num_left = len(phase.done)
    if isinstance(phase, Pausing):
        num_left = len(phase.paused | phase.done)
    if num_left < membership.world_size:
        return Decision(ledger, phase)
    if event.step > ledger.step:
        recorded = event.step if limits.is_whole else ledger.recorded_step
        ledger = record(commit(ledger, event.step, event.origin, has_vote=False), recorded)
    if len(phase.done) == membership.world_size:
        why = f"the training loop has returned after step {ledger.step}"
        return end(ledger, phase, "succeeded", why, at, limits)
    if ledger.stop:
        outcome = "succeeded" if ledger.step >= limits.steps else "stopped"
        return end(ledger, phase, outcome, ledger.stop, at, limits)
    if must_keep(ledger, membership.workers, at, limits):
        phase = Pausing(membership, NumberSet.of(range(membership.world_size)))
        reason = f"the state of step {ledger.step} is to be saved for those who leave"
        return Decision(ledger, phase, (Keep(membership),), reason)
    return leave_boundary(ledger, phase, at, limits)


def is_keeping(phase: Pausing) -> bool:
    """All have paused, and are still there: they save the state for those who leave."""
    return len(phase.paused) == phase.membership.world_size


def is_too_late(ledger: Ledger, phase: Pausing, at: float) -> bool:
    """Whoever the state is saved for should be gone."""
    return not has_time(ledger, leavers_of(ledger, phase.membership.workers), at)


def leave_boundary(ledger: Ledger, phase: Running | Pausing, at: float, limits: Limits) -> Decision:
    """All members wait at the same step, and have said all that they had to say."""
    workers = phase.membership.workers
    return regroup(ledger, workers, NOBODY, False, at, limits, is_planned=True)
