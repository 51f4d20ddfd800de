"""Loading, copying state, forming generations, growing: what the phases do with live workers.

Losses are in recovery.py, the end of the run is in shutdown.py.
"""

from dataclasses import replace

from elastic.control.checkpointing import drop_save
from elastic.control.commands import Command, Form, Load, Pause, Sync
from elastic.control.planning import plan, shortage, wants_nodes
from elastic.control.pool import (
    arrivals,
    dismiss,
    explain,
    first,
    in_pool,
    move,
    names,
    set_aside,
    top_up,
)
from elastic.control.shutdown import finish
from elastic.control.state import (
    NOBODY,
    Decision,
    Forming,
    Ledger,
    Limits,
    Pausing,
    Phase,
    Running,
    Waiting,
)
from elastic.protocol.membership import Membership, NumberSet, counted, worker_name

MAX_SOURCES = 64
"""Newcomers of a waiting run are spread over at most so many sources."""
TOGETHER_S = 1.0
"""How long who has copied ahead waits for others that still do, at least; else as long as it took
itself."""


def staff(ledger: Ledger, phase: Phase, at: float, limits: Limits) -> Decision:
    """Make the most of the live workers that this phase allows."""
    ledger, dismissed = dismiss(ledger, phase)
    match phase:
        case Waiting():
            decision = staff_waiting(ledger, phase, at, limits)
        case Running():
            decision = staff_running(ledger, phase, at, limits)
        case _:
            return Decision(ledger, phase)
    if not dismissed:
        return decision
    commands = (*dismissed, *decision.commands)
    return explain("whoever was to leave has left", decision)._replace(commands=commands)


def staff_waiting(ledger: Ledger, phase: Waiting, at: float, limits: Limits) -> Decision:
    if not ledger.with_state and ledger.stop:  # asked for before this controller took over
        return finish(ledger, phase, "stopped", ledger.stop)
    if not ledger.with_state:
        return load(ledger, phase)
    num_with_state = len(ledger.with_state - ledger.leaving)
    is_enough = not lack(num_usable(ledger, tuple(ledger.with_state)), limits)
    is_complete = ledger.step >= limits.steps and not shortage(
        limits.parallel, len(ledger.with_state)
    )
    if is_enough or is_complete:  # a complete run only says its hash
        is_kept = ledger.saves.kept_step == ledger.step
        members = tuple(ledger.with_state)
        if ledger.behind:  # newcomers enter at the boundary after it
            return form(ledger, members, ledger.behind, at, limits, then_pause=True)
        ledger, members, why = without_leavers(ledger, members, limits, is_kept=is_kept)
        decision = form(ledger, members, NOBODY, at, limits, with_newcomers=True)
        return explain(why, decision)
    level = ledger.with_state - ledger.behind
    sources = first(level or ledger.with_state, MAX_SOURCES)
    return sync(ledger, phase, sources, num_with_state, at, limits)


def load(ledger: Ledger, phase: Waiting) -> Decision:
    """Nobody holds the state: the run starts, or its last tier of recovery does.

    Who followed the lost has a newer state than the newest checkpoint.
    """
    followers = ledger.synced | ledger.outdated
    if ledger.loading or not (followers or ledger.standbys):
        return Decision(ledger, phase)
    candidates = followers or ledger.standbys
    (worker,) = first(candidates - ledger.leaving or candidates, 1)
    ledger = move(ledger, worker)
    ledger = replace(ledger, loading=ledger.loading.add(worker))
    why = f"nobody alive holds step {ledger.step}" if ledger.num_generations else "the run starts"
    return Decision(ledger, phase, (Load(worker),), f"{why}: {worker_name(worker)} loads the state")


def staff_running(ledger: Ledger, phase: Running, at: float, limits: Limits) -> Decision:
    membership = phase.membership
    leavers = leavers_of(ledger, membership.workers)
    num_staying = membership.world_size - len(leavers)
    if phase.done or (num_staying >= limits.max_workers and not leavers):
        return Decision(ledger, phase)
    arrived = arrivals(ledger)
    before, phase = phase, with_patience(ledger, phase, at)
    may_leave = num_staying + len(arrived) >= limits.min_workers
    may_enter = bool(arrived) and not waits_for_copies(ledger, phase, at)
    if may_enter and (may_leave or membership.world_size < limits.max_workers):
        reason = f"pause to let {names(arrived)} in"
        return Decision(ledger, Pausing(membership), (Pause(membership),), reason)
    is_enough = num_staying >= max(1, limits.min_workers)
    can_leave = is_enough or (
        loses_state(ledger, membership.workers, limits) and has_time(ledger, leavers, at)
    )
    if can_leave and is_due(ledger, leavers, at):
        reason = f"pause to let {names(leavers)} leave"
        return Decision(ledger, Pausing(membership), (Pause(membership),), reason)
    decision = sync(ledger, phase, membership.workers, num_staying, at, limits)
    decision = copying_ahead(decision, phase, at, limits)
    if may_enter or phase.enter_by <= before.enter_by:
        return decision
    return explain(f"{names(arrived)} waits for {names(ledger.syncing)} to copy as well", decision)


def with_patience(ledger: Ledger, phase: Running, at: float) -> Running:
    """Where somebody has copied ahead the others are given as long again."""
    if phase.copying_since and not (ledger.syncing or ledger.synced):
        return replace(phase, copying_since=0.0, enter_by=0.0)
    if not (phase.copying_since and arrivals(ledger)) or phase.enter_by:
        return phase
    return replace(phase, enter_by=at + max(TOGETHER_S, at - phase.copying_since))


def waits_for_copies(ledger: Ledger, phase: Running, at: float) -> bool:
    """The boundary at which newcomers enter ends what others are sent: these would get all of it
    at one more boundary, while everybody waits. Not if somebody is about to leave."""
    is_leaving = is_due(ledger, leavers_of(ledger, phase.membership.workers), at)
    return at < phase.enter_by and not is_leaving and bool(ledger.syncing - ledger.leaving)


def copying_ahead(decision: Decision, phase: Running, at: float, limits: Limits) -> Decision:
    """Of a model in stages a newcomer copies, while the members train, what it will have if all who
    are on their way get in, and if those who are to leave do."""
    if limits.parallel.pp == 1 or not decision.commands:
        return decision
    ledger, members = decision.ledger, phase.membership.workers
    staying = tuple(w for w in members if w not in ledger.leaving)
    coming = (ledger.synced | ledger.syncing) - ledger.leaving
    workers = (*staying, *first(coming, limits.max_workers - len(staying)))
    next_order = plan(limits.parallel, workers, ledger.nodes).order

    def with_plan(command: Command) -> Command:
        if not isinstance(command, Sync) or command.worker not in workers:
            return command
        return replace(command, members=members, next_members=workers, next_order=next_order)

    copying = replace(phase, copying_since=phase.copying_since or at)
    return decision._replace(phase=copying, commands=tuple(map(with_plan, decision.commands)))


def leavers_of(ledger: Ledger, members: tuple[int, ...]) -> tuple[int, ...]:
    """Those under a drain notice."""
    return tuple(w for w in members if w in ledger.leaving) if ledger.leaving else ()


def is_due(ledger: Ledger, leavers: tuple[int, ...], at: float) -> bool:
    """Whether one of them is no longer kept until its replacement is ready."""
    those = NumberSet.of(leavers)
    return any(n.leave_at <= at for n in ledger.notices if n.worker in those)


def has_time(ledger: Ledger, leavers: tuple[int, ...], at: float) -> bool:
    """Whether one of them is still to be there for a while. Who has outlived its deadline may be
    gone at any moment: nothing waits for it, and it does not hurry the others."""
    those = NumberSet.of(leavers)
    return any(n.gone_at > at for n in ledger.notices if n.worker in those)


def sync(
    ledger: Ledger,
    phase: Phase,
    sources: tuple[int, ...],
    num_with_state: int,
    at: float,
    limits: Limits,
) -> Decision:
    """Let so many standbys copy the state that the next generation can be full.

    The second of the decision turns the sources, so that a retry meets another one.
    """
    candidates = ledger.standbys - ledger.leaving
    if not candidates:
        return Decision(ledger, phase)
    on_the_way = len(ledger.syncing) + len(ledger.synced)
    chosen = first(candidates, max(0, limits.max_workers - num_with_state - on_the_way))
    if not chosen:
        return Decision(ledger, phase)
    sources = tuple(w for w in sources if w not in ledger.leaving) or sources
    moved = NumberSet.of(chosen)
    ledger = replace(
        ledger,
        standbys=ledger.standbys - moved,
        outdated=ledger.outdated - moved,
        left=ledger.left - moved,
        syncing=ledger.syncing | moved,
    )
    commands = tuple(Sync(w, sources[(w + int(at)) % len(sources)]) for w in chosen)
    return Decision(ledger, phase, commands, f"{names(chosen)} may copy the state")


def regroup(
    ledger: Ledger,
    survivors: tuple[int, ...],
    rollers: NumberSet,
    is_between_steps: bool,
    at: float,
    limits: Limits,
    *,
    is_planned: bool = False,
) -> Decision:
    """The next generation from those who hold the state (in rank order), or wait for more.

    is_planned: all members have paused and said all that they had to say.
    """
    ledger, survivors = without_surplus(ledger, survivors, limits)
    # newcomers never take part in what follows a step that they have not made, like an evaluation
    is_closed = is_between_steps or bool(rollers and arrivals(ledger))
    can_form = not shortage(limits.parallel, len(survivors))
    if survivors and can_form and (ledger.stop or is_closed or ledger.step >= limits.steps):
        then_pause = bool(ledger.stop) or is_closed
        return form(ledger, survivors, rollers, at, limits, then_pause=then_pause)
    if survivors and not lack(num_usable(ledger, survivors), limits):
        ledger, staying, why = without_leavers(ledger, survivors, limits, is_kept=is_planned)
        return explain(why, form(ledger, staying, rollers, at, limits, with_newcomers=True))
    if ledger.stop:
        return finish(ledger, Waiting(""), "stopped", ledger.stop)
    ledger = replace(ledger, with_state=NumberSet.of(survivors), behind=rollers)
    ledger = ledger.with_losses(stillborn=0)
    if survivors and ledger.saves.kept_step == ledger.step:
        why = f"too few stay when {names(leavers_of(ledger, survivors))} leave; step {ledger.step}"
        why += " is saved"
    elif survivors:
        why = f"{lack(len(survivors), limits)}{no_memory(ledger)}, step {ledger.step}"
    else:
        why = f"nobody is left who holds step {ledger.step}"
    return explain(why, top_up(staff(ledger, Waiting(why), at, limits), at, limits))


def lack(num_workers: int, limits: Limits) -> str:
    """Why so many do not go on; empty if they do."""
    return shortage(limits.parallel, num_workers, limits.min_workers)


def no_memory(ledger: Ledger) -> str:
    """Why it takes so many workers, if that was found out; else empty."""
    too_few = ledger.losses.too_few
    return f": step and state do not fit over {too_few}" if too_few else ""


def without_surplus(
    ledger: Ledger, survivors: tuple[int, ...], limits: Limits
) -> tuple[Ledger, tuple[int, ...]]:
    """At most as many as may be members: a new controller also finds those who followed one that
    is lost, or have just left, and hold the state as well."""
    if len(survivors) <= limits.max_workers:
        return ledger, survivors
    staying_first = sorted(survivors, key=lambda w: w in ledger.leaving)
    surplus = NumberSet.of(staying_first[limits.max_workers :])
    ledger = replace(
        ledger,
        standbys=ledger.standbys | surplus,
        outdated=ledger.outdated | surplus,
        left=ledger.left | (surplus & ledger.leaving),
    )
    return ledger, tuple(w for w in survivors if w not in surplus)


def num_usable(ledger: Ledger, survivors: tuple[int, ...]) -> int:
    """How many could be members of the next generation."""
    num_leavers = len(leavers_of(ledger, survivors)) if ledger.saves.kept_step == ledger.step else 0
    return len(survivors) - num_leavers + len(arrivals(ledger))


def loses_state(ledger: Ledger, members: tuple[int, ...], limits: Limits) -> bool:
    """Whether what `members` hold is gone when those under notice are, though it can be saved."""
    leavers = leavers_of(ledger, members)
    if not leavers or not limits.can_save:
        return False
    if not limits.is_whole and not limits.has_copies:
        return True
    return len(leavers) == len(members) and len(arrivals(ledger)) < limits.min_workers


def must_keep(ledger: Ledger, members: tuple[int, ...], at: float, limits: Limits) -> bool:
    """Whether the state of this boundary must be saved before anybody leaves."""
    leavers = leavers_of(ledger, members)
    num_staying = len(members) - len(leavers) + len(arrivals(ledger))
    is_leaving = is_due(ledger, leavers, at) or num_staying >= limits.min_workers
    if not has_time(ledger, leavers, at) or ledger.saves.kept_step == ledger.step:
        return False
    return is_leaving and loses_state(ledger, members, limits)


def without_leavers(
    ledger: Ledger,
    survivors: tuple[int, ...],
    limits: Limits,
    *,
    is_kept: bool,
) -> tuple[Ledger, tuple[int, ...], str]:
    """Who of `survivors` stays, if they are enough, and why not all. is_kept: all have paused, or
    the state is saved, so that all may leave.

    Those who leave wait in the pool until the generation has formed: newcomers may still read
    their state, which may become the newest. Of a state in parts, who survives a loss gives the
    others what it holds first, whatever its notice says, and leaves at a boundary: a lost one may
    have been the only other that had it.
    """
    if not (limits.is_whole or is_kept):
        return ledger, survivors, ""
    leavers = leavers_of(ledger, survivors)
    staying = tuple(w for w in survivors if w not in leavers)
    is_enough = len(staying) + len(arrivals(ledger)) >= limits.min_workers
    if not leavers or not is_enough or not (staying or is_kept):
        return ledger, survivors, ""
    gone = NumberSet.of(leavers)
    return set_aside(ledger, gone), staying, f"{names(gone)} leave as planned"


def form(
    ledger: Ledger,
    survivors: tuple[int, ...],
    rollers: NumberSet,
    at: float,
    limits: Limits,
    *,
    with_newcomers: bool = False,
    then_pause: bool = False,
) -> Decision:
    room = limits.max_workers - len(survivors) if with_newcomers else 0
    newcomers = first(arrivals(ledger), room)
    membership = Membership(ledger.generation + 1, (*survivors, *newcomers))
    ledger = replace(
        ledger,
        generation=membership.generation,
        with_state=NOBODY,
        behind=NOBODY,
        synced=ledger.synced - NumberSet.of(newcomers),
    )
    ledger, dropped = drop_save(ledger.with_saves(asked_at=0.0))
    rollers = rollers & NumberSet.of(survivors)
    roll_forward = tuple(rollers)
    vote_of = next((w for w in survivors if w not in rollers), None) if rollers else None
    if wants_nodes(limits.parallel):
        ledger = replace(ledger, nodes=ledger.nodes.only((*membership.workers, *in_pool(ledger))))
    planned = plan(limits.parallel, membership.workers, ledger.nodes)
    reason = announced(membership, ledger.step, newcomers, rollers, planned.note)
    command = Form(membership, ledger.step, roll_forward, vote_of, then_pause)
    command = replace(command, order=planned.order, origin=ledger.origin)
    deadline, new = at + limits.join_timeout_s, NumberSet.of(newcomers)
    forming = Forming(membership, deadline, then_pause, newcomers=new)
    return top_up(Decision(ledger, forming, (*dropped, command), reason), at, limits)


def announced(
    membership: Membership, step: int, newcomers: tuple[int, ...], rollers: NumberSet, note: str
) -> str:
    reason = f"generation {membership.generation}: {counted(membership.world_size, 'worker')}"
    reason += f" at step {step}"
    reason += f", new {names(newcomers)}" if newcomers else ""
    reason += f", {names(rollers)} roll forward" if rollers else ""
    return f"{reason}; {note}" if note else reason


def formed(ledger: Ledger, phase: Forming, at: float, limits: Limits) -> Decision:
    """Everybody has joined."""
    if phase.newcomers:
        refused = replace(ledger.losses.refused, in_a_row=0)
        ledger = ledger.with_losses(stillborn=0, refused=refused)
    membership = phase.membership
    reason = f"generation {membership.generation} has formed"
    if phase.then_pause:
        return Decision(ledger, Pausing(membership), (), f"{reason}, pauses at the next boundary")
    if ledger.stop:
        return stop_running(ledger, Running(membership))
    return explain(reason, staff(ledger, Running(membership), at, limits))


def stop_running(ledger: Ledger, phase: Running) -> Decision:
    membership = phase.membership
    pausing = Pausing(membership, done=phase.done)
    return Decision(ledger, pausing, (Pause(membership),), f"stop: {ledger.stop}")
