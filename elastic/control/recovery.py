"""Losing workers: give the generation up, hear where the survivors stand, regroup them.

Any survivor at `Ledger.step` proves the step; who holds its reduced gradient rolls forward to it;
who holds neither goes back to the pool. Only if nobody alive can reach the step does it fall.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from elastic.control.commands import Abort, Retire
from elastic.control.events import CollectiveFailed, Committed, Suspended, WorkerLost
from elastic.control.places import (
    back_off,
    back_off_s,
    emptied,
    for_the_next,
    refuse,
    remember_place,
    toll,
)
from elastic.control.pool import explain, leave, move, names, num_members, top_up
from elastic.control.resizing import in_force
from elastic.control.scaling import regroup, staff, sync
from elastic.control.shutdown import finish
from elastic.control.state import (
    NOBODY,
    Camp,
    Decision,
    Ending,
    Forming,
    Ledger,
    Limits,
    Pausing,
    Phase,
    Running,
    Suspending,
    Waiting,
)
from elastic.protocol.membership import NumberSet, worker_name

STANDBYS_S = 0.2
"""How long survivors that have all answered wait for a standby's copy of the state."""
UNPREPARED = -1
"""In place of a generation: nobody's gradients are held."""
MAX_IN_VAIN = 8
"""Generations without a committed step whose members could not get the state."""


# --- losses -------------------------------------------------------------------
def count_losses(ledger: Ledger, lost: NumberSet) -> Ledger:
    """Against the budget; whoever went after a notice does not count."""
    failures = ledger.losses.failures + len(lost - ledger.leaving)
    return replace(ledger.with_losses(failures=failures), leaving=ledger.leaving - lost)


def lose_member(
    ledger: Ledger,
    phase: Forming | Running | Pausing | Suspending | Ending,
    event: WorkerLost,
    limits: Limits,
) -> Decision:
    """Of a generation that is at its end only where the state is sharded: the others get the lost
    rows, and end again."""
    lost = NumberSet.of((event.worker,))
    ledger = remember_place(count_losses(ledger, lost), phase, event, limits)
    if isinstance(phase, Suspending):
        phase = without_answer(phase, phase.membership.rank_of(event.worker))
        suspending = replace(phase, lost=phase.lost | lost, deadline=None, is_overdue=False)
        commands = ()
    else:
        suspending = Suspending(
            phase.membership, lost, None, was_forming=isinstance(phase, Forming)
        )
        commands = (Abort(phase.membership),)
    if ledger.losses.failures > limits.max_failures or ledger.losses.device_fault.then:
        return spend_budget(ledger, suspending, told(event) + toll(ledger, event), limits)
    reason = (
        f"{worker_name(event.worker)} lost ({told(event)}), {num_members(suspending)} of "
        f"{phase.membership.world_size} left, min {limits.min_workers}, "
        f"budget {ledger.losses.failures}/{limits.max_failures}"
    )
    reason += for_the_next(ledger, event, limits)
    called = call_standbys(ledger, suspending, event.at, limits)
    called = called._replace(commands=(*commands, *called.commands))
    return settle(explain(reason, called), event.at, limits)


def call_standbys(ledger: Ledger, phase: Suspending, at: float, limits: Limits) -> Decision:
    """Have them copy the state while the survivors leave their collectives, so that the next
    generation is full at once: no steps of fewer workers, and no second regroup."""
    sources = tuple(w for w in phase.membership.workers if w not in phase.lost)
    has_no_room = ledger.stop or ledger.step >= limits.steps
    if not sources or has_no_room or ledger.slow_copies or phase.was_forming:
        return Decision(ledger, phase)
    decision = sync(ledger, phase, sources, len(sources), at, limits)
    if not decision.commands:
        return decision
    called = phase.called | (decision.ledger.syncing - ledger.syncing)
    return decision._replace(phase=replace(phase, called=called, standbys_by=at + STANDBYS_S))


def told(event: WorkerLost) -> str:
    return f"{event.cause}: {event.why}" if event.why else event.cause


def lose_outsider(ledger: Ledger, phase: Phase, event: WorkerLost, limits: Limits) -> Decision:
    """A worker of the pool is gone."""
    had_state, had_notice = event.worker in ledger.with_state, event.worker in ledger.leaving
    if had_state:
        ledger = leave(count_losses(ledger, NumberSet.of((event.worker,))), event.worker)
        return lose_state(ledger, phase, event, limits)
    ledger = leave(ledger, event.worker)
    if had_notice:
        reason = f"{worker_name(event.worker)} is gone ({event.cause}), as it had said"
        return explain(reason, top_up(staff(ledger, phase, event.at, limits), event.at, limits))
    ledger = back_off(ledger, event.at)
    if event.cause == "unfit" and not isinstance(phase, Waiting):
        ledger = refuse(ledger, event.at)
    stillborn = ledger.losses.stillborn
    reason = (
        f"{worker_name(event.worker)} lost ({told(event)}) before it took part, "
        f"number {stillborn} in a row, next spawn in {back_off_s(stillborn):g} s"
        f"{emptied(ledger, event)}"
    )
    if isinstance(phase, Waiting) and stillborn > limits.max_failures:
        reason = (
            f"{stillborn} workers in a row died before they took part, the last "
            f"{worker_name(event.worker)} ({told(event)}); max_failures is {limits.max_failures}"
        )
        return finish(ledger, phase, "failed", reason)
    return explain(reason, top_up(staff(ledger, phase, event.at, limits), event.at, limits))


def lose_state(ledger: Ledger, phase: Phase, event: WorkerLost, limits: Limits) -> Decision:
    """A waiting run lost one of those who hold its state."""
    if ledger.losses.failures > limits.max_failures:
        why = budget_reason(ledger, NumberSet.of((event.worker,)), told(event), limits)
        return finish(ledger, phase, "failed", why)
    reason = (
        f"{worker_name(event.worker)} lost ({told(event)}) while waiting, "
        f"{len(ledger.with_state)} left who hold step {ledger.step}, "
        f"budget {ledger.losses.failures}/{limits.max_failures}"
    )
    return explain(reason, top_up(staff(ledger, phase, event.at, limits), event.at, limits))


def spend_budget(ledger: Ledger, phase: Suspending, cause: str, limits: Limits) -> Decision:
    reason = budget_reason(ledger, phase.lost, cause, limits)
    return finish(ledger, phase, "failed", reason)


def budget_reason(ledger: Ledger, lost: NumberSet, cause: str, limits: Limits) -> str:
    who = f"{names(lost)} lost ({cause})" if lost else cause
    if (fault := ledger.losses.device_fault).then:
        before = f"step {fault.step + 1} has failed on {fault.device} before"
        return f"{who}: {before}, it is not the GPU"
    return (
        f"{who}: {ledger.losses.failures} failures since step {ledger.step} was committed, "
        f"max_failures is {limits.max_failures}"
    )


# --- a generation that failed without a known loss --------------------------------
def suspect_loss(
    ledger: Ledger,
    phase: Forming | Running | Pausing | Ending,
    event: CollectiveFailed,
    limits: Limits,
) -> Decision:
    """At the end of the run only where the state is sharded: its hash takes a collective."""
    if event.is_stall:
        return give_up_stalled(ledger, phase, event, limits)
    who = worker_name(phase.membership.workers[event.rank])
    suspending = Suspending(
        phase.membership,
        NOBODY,
        event.at + limits.confirm_timeout_s,
        event.message,
        event.is_refused,
        was_forming=isinstance(phase, Forming),
        apart=apart(phase) if isinstance(phase, Forming) else NOBODY,
    )
    reason = f"a collective of {who} failed: {event.message}"
    return Decision(ledger, suspending, (Abort(phase.membership),), reason)


def hear_complaint(
    ledger: Ledger, phase: Suspending, event: CollectiveFailed, limits: Limits
) -> Decision:
    """The first one is told; or the one that was refused, or needs no loss, of which the others are
    consequences."""
    if event.is_refused and not phase.is_refused:
        return Decision(ledger, replace(phase, complaint=event.message, is_refused=True))
    if event.is_stall:
        return hear_stall(ledger, phase, event, limits)
    return Decision(ledger, replace(phase, complaint=phase.complaint or event.message))


def hear_stall(
    ledger: Ledger, phase: Suspending, event: CollectiveFailed, limits: Limits
) -> Decision:
    """It needs no loss to explain it, unless that of somebody who had not met the others."""
    if event.too_few >= limits.max_workers:
        why = f"{event.message}; max_workers is {limits.max_workers}"
        return finish(ledger, phase, "failed", why)
    if event.too_few:
        ledger = remember_shortage(ledger, event)
        phase = replace(phase, complaint=event.message, deadline=None, is_overdue=False)
        return settle(Decision(ledger, phase), event.at, in_force(ledger, limits))
    if (phase.deadline is None and not phase.is_overdue) or given_up(phase):
        return Decision(ledger, replace(phase, complaint=phase.complaint or event.message))
    phase = replace(phase, complaint=event.message, deadline=None, is_overdue=True)
    return settle(Decision(ledger, phase), event.at, limits)


def give_up_stalled(
    ledger: Ledger,
    phase: Forming | Running | Pausing | Ending,
    event: CollectiveFailed,
    limits: Limits,
) -> Decision:
    """The same members try again, as often as workers may be lost without a committed step. Where
    they have no memory for a step that more of them had, more are waited for."""
    why, suspending = event.message, Suspending(phase.membership, NOBODY, None, event.message)
    if event.too_few >= limits.max_workers:
        return finish(ledger, phase, "failed", f"{why}; max_workers is {limits.max_workers}")
    if event.too_few:
        ledger = remember_shortage(ledger, event)
        return Decision(ledger, suspending, (Abort(phase.membership),), why)
    ledger = ledger.with_losses(failures=ledger.losses.failures + 1)
    if ledger.losses.failures > limits.max_failures:
        return spend_budget(ledger, suspending, why, limits)
    reason = f"{why}; budget {ledger.losses.failures}/{limits.max_failures}"
    return Decision(ledger, suspending, (Abort(phase.membership),), reason)


def remember_shortage(ledger: Ledger, event: CollectiveFailed) -> Ledger:
    return ledger.with_losses(too_few=max(ledger.losses.too_few, event.too_few))


def apart(phase: Forming) -> NumberSet:
    """Ranks that are still to meet the others."""
    return NumberSet.of(range(phase.membership.world_size)) - phase.joined - phase.connected


def abort_late(ledger: Ledger, phase: Forming, at: float, limits: Limits) -> Decision:
    """The rendezvous is a barrier, so who is missing cannot be told from who has not joined."""
    membership, missing = phase.membership, apart(phase)
    complaint = (
        f"generation {membership.generation}: {len(missing)} of {membership.world_size} "
        f"workers had not joined after {limits.join_timeout_s:g} s"
    )
    deadline = at + limits.confirm_timeout_s
    suspending = Suspending(
        membership, NOBODY, deadline, complaint, was_forming=True, apart=missing
    )
    return Decision(ledger, suspending, (Abort(membership),), complaint)


def abort_arrival(
    ledger: Ledger, phase: Forming | Running | Pausing, worker: int, reason: str
) -> Decision:
    """A newcomer cannot get the last step, or of a sharded state rows are missing: nobody failed,
    the others form without it, or all begin at the newest checkpoint. Not for ever."""
    in_vain = ledger.losses.in_vain + 1
    ledger = ledger.with_losses(in_vain=in_vain)
    if in_vain > MAX_IN_VAIN:
        why = (
            f"{in_vain} generations in a row could not get the state of step {ledger.step}, "
            f"the last: {worker_name(worker)}: {reason}"
        )
        return finish(ledger, phase, "failed", why)
    suspending = Suspending(phase.membership, NOBODY, None, was_forming=True)
    why = f"{worker_name(worker)} cannot join, it needs another source: {reason}"
    return Decision(ledger, suspending, (Abort(phase.membership),), why)


def expire(ledger: Ledger, phase: Suspending, at: float, limits: Limits) -> Decision:
    """No loss was reported in time. Whoever had not met the others is given up; who else has not
    answered may be inside a long micro-batch or a piece of its state. There is no second deadline:
    suspicion watches whoever was asked, and tells a hang from what usually takes so long there."""
    silent = NumberSet.of(range(phase.membership.world_size)) - answered(phase)
    if not silent:
        return try_again(ledger, phase, at, limits)
    workers = given_up(phase)
    if not workers:
        waiting = names(phase.membership.workers[rank] for rank in silent)
        reason = f"no worker is lost after: {phase.complaint}; {waiting} did not answer yet"
        return Decision(ledger, replace(phase, deadline=None, is_overdue=True), (), reason)
    ledger = count_losses(ledger, workers)
    suspending = replace(phase, lost=phase.lost | workers, deadline=None)
    retire = (Retire(tuple(workers)),)
    if ledger.losses.failures > limits.max_failures:
        decision = spend_budget(ledger, suspending, phase.complaint, limits)
        return decision._replace(commands=(*retire, *decision.commands))
    reason = f"{phase.complaint}; {names(workers)} did not answer and are given up"
    return settle(Decision(ledger, suspending, retire, reason), at, limits)


def given_up(phase: Suspending) -> NumberSet:
    """Workers that are lost at the deadline."""
    ranks = phase.apart - answered(phase)
    return NumberSet.of(phase.membership.workers[rank] for rank in ranks)


def try_again(ledger: Ledger, phase: Suspending, at: float, limits: Limits) -> Decision:
    """All have answered: connections that broke between the living are made again, what the backend
    has refused surfaces."""
    if phase.is_refused:
        return finish(ledger, phase, "failed", f"no worker is lost, but {phase.complaint}")
    ledger = ledger.with_losses(failures=ledger.losses.failures + 1)
    if ledger.losses.failures > limits.max_failures:
        return spend_budget(ledger, phase, phase.complaint, limits)
    reason = f"no worker is lost, the same ones try again after: {phase.complaint}"
    explained = replace(phase, deadline=None, is_overdue=False)
    return settle(Decision(ledger, explained, (), reason), at, limits)


# --- answers ------------------------------------------------------------------
def answered(phase: Suspending) -> NumberSet:
    return ranks_of(phase.answers)


def ranks_of(camps: Iterable[Camp]) -> NumberSet:
    return reduce(NumberSet.__or__, (camp.ranks for camp in camps), NOBODY)


def without_answer(phase: Suspending, rank: int) -> Suspending:
    kept = (replace(camp, ranks=camp.ranks.remove(rank)) for camp in phase.answers)
    answers = tuple(camp for camp in kept if camp.ranks)
    between, copied = phase.between.remove(rank), phase.copied.remove(rank)
    return replace(phase, answers=answers, between=between, copied=copied)


def with_answer(phase: Suspending, event: Suspended) -> Suspending:
    prepared_by = event.prepared_by if event.is_prepared else UNPREPARED
    said = Camp(event.step, event.origin, prepared_by, NumberSet.of((event.rank,)))
    if event.is_between_steps:
        phase = replace(phase, between=phase.between.add(event.rank))
    if event.is_copied:
        phase = replace(phase, copied=phase.copied.add(event.rank))
    for i, camp in enumerate(phase.answers):
        if replace(camp, ranks=said.ranks) == said:
            camp = replace(camp, ranks=camp.ranks.add(event.rank))
            return replace(phase, answers=(*phase.answers[:i], camp, *phase.answers[i + 1 :]))
    return replace(phase, answers=(*phase.answers, said))


def learn_step(ledger: Ledger, event: Committed | Suspended, limits: Limits) -> Ledger:
    """Somebody has committed a step. Of one that two generations have done, the later counts: the
    earlier one's was lost with its members, but for those who followed them."""
    recorded = ledger.recorded_step
    if not limits.is_whole:
        return replace(ledger, step=max(ledger.step, event.step), recorded=recorded)
    said, known = (event.step, event.origin), (ledger.step, ledger.origin)
    if said > known:
        ledger = replace(ledger, step=event.step, origin=event.origin, recorded=recorded)
        return replace(ledger, has_vote=event.has_vote, left=NOBODY)
    if said == known:
        return replace(ledger, has_vote=ledger.has_vote or event.has_vote)
    return ledger


def hear_answer(ledger: Ledger, phase: Suspending, event: Suspended, limits: Limits) -> Decision:
    if event.rank in answered(phase):
        return Decision(ledger, phase)
    if phase.standbys_by:  # the source serves nobody before it is out of its step
        phase = replace(phase, standbys_by=event.at + STANDBYS_S)
    ledger = learn_step(ledger, event, limits)
    return settle(Decision(ledger, with_answer(phase, event)), event.at, limits)


def level(ledger: Ledger, phase: Suspending, limits: Limits) -> NumberSet:
    """Ranks that hold the state of `Ledger.step`; of one in parts, whatever a rank holds may be
    what is needed."""
    if not limits.is_whole:
        return ranks_of(camp for camp in phase.answers if camp.step >= 0)
    newest = ledger.step, ledger.origin
    return ranks_of(camp for camp in phase.answers if (camp.step, camp.origin) == newest)


def rolling(ledger: Ledger, phase: Suspending) -> NumberSet:
    """Ranks one step behind that hold the gradient which `Ledger.step` was made with."""
    if not ledger.has_vote:
        return NOBODY
    return ranks_of(
        camp
        for camp in phase.answers
        if camp.step == ledger.step - 1 and camp.prepared_by == ledger.origin
    )


def awaited(ledger: Ledger, phase: Suspending) -> NumberSet:
    """Who was called, may still come, and would be taken in by the next generation. Whoever copies
    the state for another reason began at another time, and may be anywhere in it."""
    is_closed = phase.between or any(camp.step == ledger.step - 1 for camp in phase.answers)
    if is_closed or ledger.stop:
        return NOBODY
    return (ledger.syncing & phase.called) - ledger.leaving


def settle(decision: Decision, at: float, limits: Limits) -> Decision:
    """Regroup as soon as everybody alive has answered and something explains the failure."""
    ledger, phase = decision.ledger, decision.phase
    assert isinstance(phase, Suspending)
    said = answered(phase)
    if len(said) < num_members(phase):
        return decision
    if late := awaited(ledger, phase):
        if at < phase.standbys_by:
            return decision
        ledger = replace(ledger, slow_copies=ledger.slow_copies | late)
    if phase.deadline is not None or phase.is_overdue:
        if not phase.was_forming:
            if not phase.is_overdue:
                return decision  # the loss may still be reported
            return explain(decision.reason, try_again(ledger, phase, at, limits))
        if said == level(ledger, phase, limits):  # no newcomer without state explains it either
            ledger = ledger.with_losses(failures=ledger.losses.failures + 1)
            if ledger.losses.failures > limits.max_failures:
                return spend_budget(ledger, phase, phase.complaint, limits)
    next_ = regroup_answered(ledger, phase, at, limits)
    commands = (*decision.commands, *next_.commands)
    return explain(decision.reason, next_)._replace(commands=commands)


def regroup_answered(ledger: Ledger, phase: Suspending, at: float, limits: Limits) -> Decision:
    workers = phase.membership.workers
    rollers = rolling(ledger, phase) if limits.is_whole else NOBODY
    usable, fallen = level(ledger, phase, limits) | rollers, ""
    near = [camp for camp in phase.answers if camp.step >= max(0, ledger.step - 1)]
    left = ledger.left if limits.is_whole and not usable else NOBODY
    if left:
        fallen = f"{names(left)} have left with the state of step {ledger.step} and come back; "
    elif not usable and near:
        camp = max(near, key=lambda camp: (camp.step, camp.origin))
        fallen = f"whoever held step {ledger.step} is lost: back to "
        fallen += f"{camp.step}; " if camp.step < ledger.step else f"generation {camp.origin}'s; "
        ledger = replace(ledger, step=camp.step, origin=camp.origin, has_vote=False)
        usable = level(ledger, phase, limits)
    if limits.is_whole and (rollers or usable & phase.between):
        # what follows the step, like an evaluation, would wait for who has not made it
        usable = usable - (phase.copied - phase.between - rollers)
    stateless = NumberSet.of(workers[rank] for rank in answered(phase) - usable)
    with_state = NumberSet.of(workers[rank] for rank in ranks_of(near) - usable)
    ledger = replace(
        ledger, standbys=ledger.standbys | stateless, outdated=ledger.outdated | with_state
    )
    for worker in left:
        ledger = move(ledger, worker)
    decision = regroup(
        ledger,
        (*(workers[rank] for rank in usable), *left),
        NumberSet.of(workers[rank] for rank in rollers),
        bool(usable & phase.between),
        at,
        limits,
    )
    return decision._replace(reason=fallen + decision.reason)
