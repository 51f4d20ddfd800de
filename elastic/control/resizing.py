"""Another number of workers for a run that goes on: `elastic scale`.

Whoever is too many leaves as under a drain notice, between two steps; how is scaling.py's.
"""

from dataclasses import replace

from elastic.control.commands import Command, Retire
from elastic.control.events import Resized
from elastic.control.pool import explain, leave, lost_members, top_up
from elastic.control.scaling import staff
from elastic.control.state import Active, Decision, Ledger, Limits, Notice, Phase
from elastic.protocol.membership import NumberSet, workers_from_to
from elastic.protocol.timeouts import UNLIMITED_S


def in_force(ledger: Ledger, limits: Limits) -> Limits:
    """The limits, with the number of workers that was asked for last, and at least as many as have
    memory enough for a step."""
    if ledger.max_workers:
        limits = replace(limits, min_workers=ledger.min_workers, max_workers=ledger.max_workers)
    too_few = ledger.losses.too_few
    if too_few and too_few >= limits.min_workers:
        limits = replace(limits, min_workers=too_few + 1)
    return limits


def resize(ledger: Ledger, phase: Phase, event: Resized, limits: Limits) -> Decision:
    """From now on the run has so many workers. Who is there longest stays."""
    ledger = ledger.with_losses(too_few=0)  # whoever asks for so few may know better
    ledger = replace(ledger, min_workers=event.min_workers, max_workers=event.max_workers)
    limits, at = in_force(ledger, limits), event.at
    reason = f"resized to {workers_from_to(event.min_workers, event.max_workers)}"
    unplaced, leavers = surplus(ledger, phase, limits)
    for worker in unplaced:
        ledger = leave(ledger, worker)
    notices = tuple(Notice(worker, at, at + UNLIMITED_S) for worker in leavers)
    ledger = replace(
        ledger,
        leaving=ledger.leaving | NumberSet.of(leavers),
        notices=(*(n for n in ledger.notices if n.worker in ledger.leaving), *notices),
    )
    retired: tuple[Command, ...] = (Retire(unplaced),) if unplaced else ()
    decision = top_up(staff(ledger, phase, at, limits), at, limits)
    return explain(reason, decision)._replace(commands=(*retired, *decision.commands))


def surplus(
    ledger: Ledger, phase: Phase, limits: Limits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who is too many: those that are only asked for, and those that leave what they do.

    Nobody goes who is to load the state that the run begins with.
    """
    members = tuple(ledger.with_state)
    if isinstance(phase, Active):
        gone = lost_members(phase)
        members = tuple(w for w in phase.membership.workers if w not in gone)
    staying = tuple(w for w in members if w not in ledger.leaving)
    num_staying = min(len(staying), limits.max_workers)
    room = limits.max_workers + limits.standby - num_staying - len(ledger.loading - ledger.leaving)
    outside: list[int] = []
    for kind in (ledger.synced, ledger.syncing, ledger.standbys, ledger.spawned):
        outside += kind - ledger.leaving
    extra = tuple(outside[max(0, room) :])
    unplaced = tuple(w for w in extra if w in ledger.spawned)
    leavers = tuple(w for w in extra if w not in ledger.spawned)
    return unplaced, (*staying[limits.max_workers :], *leavers)
