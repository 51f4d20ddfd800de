"""A new controller takes over: what it knows from the journal, corrected by those who live.

The journal's tail may be missing, commands may have reached some workers only, and reports may
have reached nobody. Where everything points to a generation at work, it is left at work. Else all
who hold state are called together as one more generation, and the usual regrouping follows.
"""

from collections.abc import Iterable
from dataclasses import replace

from elastic.control.checkpointing import drop_save
from elastic.control.commands import Finish, Recall
from elastic.control.events import Adopted
from elastic.control.planning import Nodes, wants_nodes
from elastic.control.pool import explain, in_pool, names, record, top_up
from elastic.control.scaling import staff
from elastic.control.shutdown import finish
from elastic.control.standing import Standing
from elastic.control.state import (
    NOBODY,
    Active,
    Decision,
    Ending,
    Finished,
    Ledger,
    Limits,
    Notice,
    Phase,
    Running,
    Save,
    Suspending,
    Waiting,
)
from elastic.protocol.membership import Membership, NumberSet, counted
from elastic.protocol.timeouts import UNLIMITED_S

IT_ENDED = "it ended"
"""Why a run was to stop whose journal does not say it."""
UNHEARD = 4
"""Generations that may have been called without a trace: the journal's tail (a tenth of a second,
each takes a loss, a load and a joining) and all who were told are lost. Their numbers are not given
again: parts and copies may bear them."""


def adopt(ledger: Ledger, phase: Phase, event: Adopted, limits: Limits) -> Decision:
    """Go on from where the workers stand. `ledger` and `phase` are the journal's."""
    standings = event.standings
    if isinstance(phase, Finished):
        everybody = NumberSet.of(s.worker for s in standings)
        ledger = replace(with_pool(ledger, ()), standbys=everybody)
        return finish(ledger, Waiting(""), phase.outcome, phase.reason, phase.weights_sha256)
    holding, failures = with_state(standings), failures_of(ledger, phase, standings)
    dismissed = dismissed_before(ledger, phase, standings)
    ledger = with_pool(ledger, standings)
    ledger = let_go(ledger, dismissed, event.at)
    if wants_nodes(limits.parallel):
        ledger = replace(ledger, nodes=Nodes.of((s.worker, s.node) for s in standings))
    ledger = replace(ledger, next_worker=max(ledger.next_worker, event.newest + 1))
    if holding:  # a step that nobody alive has is lost: its vote died with the controller
        step, origin = proven_state(holding, limits)
        ledger = replace(ledger, step=step, origin=origin, has_vote=False)
        ledger = record(ledger, step if event.recorded < 0 else event.recorded)
    found = f"a new controller: {counted(len(standings), 'worker')} found"
    beyond = replace(ledger, generation=ledger.generation + UNHEARD * (ledger.num_generations > 0))
    if any(s.kind == "ended" for s in holding):
        if not limits.is_whole:
            return recall_ended(beyond, phase, holding, found, limits)
        return end_again(beyond, phase, holding, event.at, limits)
    membership = at_work(holding)
    if membership is not None and membership.generation >= ledger.generation:
        running = Running(membership)
        older = NumberSet.of(s.worker for s in holding) - NumberSet.of(membership.workers)
        ledger = replace(
            ledger,
            standbys=ledger.standbys | older,
            outdated=older,
        ).with_saves(current=Save())  # every rank says again what it has saved
        reason = f"{found}, generation {membership.generation} is at work"
        return explain(reason, with_staff(Decision(ledger, running), event.at, limits))
    if holding:
        return recall(beyond, holding, found)
    stillborn = ledger.losses.stillborn if isinstance(phase, Waiting) else 0
    ledger, dropped = drop_save(beyond.with_losses(failures=failures, stillborn=stillborn))
    why = f"{found}, none holds the state of step {ledger.step}"
    decision = with_staff(Decision(ledger, Waiting(why)), event.at, limits)
    return explain(why, decision)._replace(commands=(*dropped, *decision.commands))


def with_pool(ledger: Ledger, standings: tuple[Standing, ...]) -> Ledger:
    """The ledger with those who hold no state of their own; whoever was on its way is given up.

    Its generation is the highest that anybody was told of: the next one is above all of them.
    """

    def who(kind: str) -> NumberSet:
        return NumberSet.of(s.worker for s in standings if s.kind == kind)

    newest = max((s.worker for s in standings), default=-1)
    everybody = NumberSet.of(s.worker for s in standings)
    return replace(
        ledger,
        generation=max([ledger.generation, *(s.generation for s in standings)]),
        next_worker=max(ledger.next_worker, newest + 1),
        losses=replace(ledger.losses, failures=0),
        spawned=who("starting"),
        standbys=who("standby"),
        outdated=NOBODY,
        left=NOBODY,
        loading=NOBODY,
        syncing=who("syncing"),
        synced=who("synced"),
        with_state=NOBODY,
        behind=NOBODY,
        saves=replace(ledger.saves, kept_step=-1),  # its end may never have been heard
        leaving=ledger.leaving & everybody,
        slow_copies=ledger.slow_copies & everybody,
    )


def dismissed_before(
    ledger: Ledger, phase: Phase, standings: tuple[Standing, ...]
) -> tuple[int, ...]:
    """Those alive whom the journal's controller had counted out: the Retire that ends them may have
    been lost with it."""
    members = phase.membership.workers if isinstance(phase, Active) else ()
    counted_in = in_pool(ledger) | ledger.spawned | NumberSet.of(members)
    known = (s.worker for s in standings if s.worker < ledger.next_worker)
    return tuple(worker for worker in known if worker not in counted_in)


def let_go(ledger: Ledger, workers: tuple[int, ...], at: float) -> Ledger:
    """They leave as under a drain notice: at once, unless what they hold is needed."""
    notices = tuple(Notice(worker, at, at + UNLIMITED_S) for worker in workers)
    leaving = ledger.leaving | NumberSet.of(workers)
    return replace(
        ledger,
        leaving=leaving,
        notices=(*(n for n in ledger.notices if n.worker in ledger.leaving), *notices),
    )


def failures_of(ledger: Ledger, phase: Phase, standings: tuple[Standing, ...]) -> int:
    """Whether nobody holds the state because of losses, for which the budget of falls is: 1, since
    what took the controller along may have been one loss for all."""
    members = phase.membership.workers if isinstance(phase, Active) else ()
    missing = (NumberSet.of(members) | ledger.with_state) - NumberSet.of(
        s.worker for s in standings
    )
    return int(ledger.losses.failures > 0 or bool(missing - ledger.leaving))


def at_work(holding: tuple[Standing, ...]) -> Membership | None:
    """The newest generation that any of them is a member of, if it is whole and working."""
    newest = max((s.generation for s in holding), default=0)
    by_rank = sorted((s for s in holding if s.generation == newest), key=lambda s: s.rank)
    if not by_rank or any(s.kind != "working" for s in by_rank):
        return None
    first = by_rank[0]
    ranks = [(s.generation, s.world_size, s.rank) for s in by_rank]
    if ranks != [(first.generation, first.world_size, rank) for rank in range(first.world_size)]:
        return None
    return Membership(first.generation, tuple(s.worker for s in by_rank))


def proven_state(holding: tuple[Standing, ...], limits: Limits) -> tuple[int, int]:
    """The committed step that the ledger may name before anybody has brought a vote, and the
    generation that computed it: the last one of those that did.

    A standing brings none. If some members are one step behind others, their step is named: those
    ahead prove theirs with the vote of their Suspended or Committed, or the step is done again.
    A sharded state never rolls forward: there the newest step counts.
    """
    newest = max(s.step for s in holding)
    proven = newest
    if limits.is_whole:
        proven = min(s.step for s in holding if s.step >= newest - 1)
    return proven, max(s.origin for s in holding if s.step == proven)


def with_state(standings: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(s for s in standings if s.kind in ("working", "stopped", "ended"))


def have_all(
    standings: tuple[Standing, ...],
    step: int,
    expected: Iterable[int],
    limits: Limits,
    origin: int = 0,
) -> bool:
    """Whether those who have introduced themselves are enough for the state of `step`, the last one
    on record: then whoever is missing may be given up as a member that hangs.

    expected: who should hold it, by the journal. origin: the generation that computed the step; 0:
    the journal does not say.
    """
    holding = with_state(standings)
    if max(((s.step, s.origin) for s in holding), default=(-1, 0)) < (step, origin):
        return False  # it may be the missing one's alone
    if limits.is_whole:
        return True
    newest = max(holding, key=lambda s: s.generation)
    num_members = sum(s.generation == newest.generation for s in holding)
    missing = set(expected) - {s.worker for s in standings}
    # the copies of one member's part are elsewhere, those of two may be with each other
    return limits.has_copies and max(len(missing), newest.world_size - num_members) <= 1


def recall(ledger: Ledger, holding: tuple[Standing, ...], found: str) -> Decision:
    """As if a generation of all of them had failed to form."""
    workers = tuple(s.worker for s in sorted(holding, key=lambda s: (-s.generation, s.rank)))
    membership = Membership(ledger.generation + 1, workers)
    ledger, dropped = drop_save(replace(ledger, generation=membership.generation))
    suspending = Suspending(membership, NOBODY, None, was_forming=True)
    reason = f"{found}, {names(workers)} are called together"
    return Decision(ledger, suspending, (*dropped, Recall(membership)), reason)


def recall_ended(
    ledger: Ledger, phase: Phase, holding: tuple[Standing, ...], found: str, limits: Limits
) -> Decision:
    """Each of those who were to write the final state has rows of its place in a mesh that is no
    more: a generation of those who live puts the rows together, then all end again."""
    has_returned = isinstance(phase, Ending) and phase.outcome == "succeeded"
    if ledger.step < limits.steps and not has_returned:
        ledger = replace(ledger, stop=ledger.stop or IT_ENDED)
    return recall(ledger, holding, found)


def end_again(
    ledger: Ledger, phase: Phase, holding: tuple[Standing, ...], at: float, limits: Limits
) -> Decision:
    """Whoever ended holds the final state, whole; the others may hold it as well or are left
    alone."""
    step, origin = max((s.step, s.origin) for s in holding if s.kind == "ended")
    last = tuple(s for s in holding if (s.step, s.origin) == (step, origin))
    workers = tuple(s.worker for s in sorted(last, key=lambda s: (-s.generation, s.rank)))
    membership = Membership(ledger.generation + 1, workers)
    outcome, why = "succeeded" if step >= limits.steps else "stopped", ledger.stop or IT_ENDED
    if isinstance(phase, Ending):
        outcome, why = phase.outcome, phase.reason
    others = NumberSet.of(s.worker for s in holding) - NumberSet.of(workers)
    ledger = replace(
        ledger,
        generation=membership.generation,
        step=step,
        origin=origin,
        has_vote=False,
        standbys=ledger.standbys | others,
    )
    ledger, dropped = drop_save(ledger)
    ending = Ending(membership, outcome, why, at + limits.end_timeout_s)
    reason = f"a new controller: {names(workers)} write the final state of step {step}"
    return Decision(ledger, ending, (*dropped, Finish(membership, outcome)), reason)


def with_staff(decision: Decision, at: float, limits: Limits) -> Decision:
    staffed = staff(decision.ledger, decision.phase, at, limits)
    commands = (*decision.commands, *staffed.commands)
    return top_up(staffed._replace(commands=commands), at, limits)
