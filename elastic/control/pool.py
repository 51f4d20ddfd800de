"""The workers outside the generation: who they are, how many are wanted, how they are moved.

What the phases do with them is in scaling.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from itertools import islice

from elastic.control.commands import Command, Retire, Spawn
from elastic.control.detection.patience import forget
from elastic.control.state import (
    NO_DEVICE_FAULT,
    NOBODY,
    Active,
    Decision,
    Ledger,
    Limits,
    Phase,
    Running,
    Suspending,
    Waiting,
)
from elastic.protocol.membership import NumberSet, worker_name

MAX_NAMES = 8


def names(workers: Iterable[int]) -> str:
    """The first few by name: a reason is one line."""
    shown = tuple(islice(workers, MAX_NAMES + 1))
    dots = " ..." if len(shown) > MAX_NAMES else ""
    return " ".join(worker_name(w) for w in shown[:MAX_NAMES]) + dots


def explain(reason: str, decision: Decision) -> Decision:
    """Put the reason in front of what followed from it."""
    whole = "; ".join(part for part in (reason, decision.reason) if part)
    return decision._replace(reason=whole)


def first(numbers: NumberSet, count: int) -> tuple[int, ...]:
    """The `count` lowest."""
    return tuple(islice(numbers, count))


def pool_sets(ledger: Ledger) -> tuple[NumberSet, ...]:
    """Every live worker that is not a member is in exactly one of these."""
    return (
        ledger.spawned,
        ledger.standbys,
        ledger.loading,
        ledger.syncing,
        ledger.synced,
        ledger.with_state,
    )


def in_pool(ledger: Ledger) -> NumberSet:
    """Every live worker that is not a member."""
    spawned, *others = pool_sets(ledger)
    return reduce(NumberSet.__or__, others, spawned)


def set_aside(ledger: Ledger, workers: NumberSet) -> Ledger:
    """They hold the state of `step`, and are no members of the next generation."""
    return replace(
        ledger,
        standbys=ledger.standbys | workers,
        outdated=ledger.outdated | workers,
        left=ledger.left | workers,
    )


def record(ledger: Ledger, step: int) -> Ledger:
    """The record ends with `step`."""
    return replace(ledger, recorded=-1 if step >= ledger.step else step)


def commit(ledger: Ledger, step: int, origin: int, *, has_vote: bool) -> Ledger:
    losses = ledger.losses
    falls = losses.falls if step <= losses.fallen_from else 0
    costly = forget(losses.costly, step)
    fault = losses.device_fault if step <= losses.device_fault.step else NO_DEVICE_FAULT
    losses = replace(losses, failures=0, in_vain=0, falls=falls, costly=costly, device_fault=fault)
    return replace(ledger, step=step, origin=origin, has_vote=has_vote, left=NOBODY, losses=losses)


def is_in_pool(ledger: Ledger, worker: int) -> bool:
    return any(worker in of_kind for of_kind in pool_sets(ledger))


def leave(ledger: Ledger, worker: int) -> Ledger:
    return replace(
        ledger,
        spawned=ledger.spawned.remove(worker),
        standbys=ledger.standbys.remove(worker),
        outdated=ledger.outdated.remove(worker),
        left=ledger.left.remove(worker),
        loading=ledger.loading.remove(worker),
        syncing=ledger.syncing.remove(worker),
        synced=ledger.synced.remove(worker),
        with_state=ledger.with_state.remove(worker),
        behind=ledger.behind.remove(worker),
        leaving=ledger.leaving.remove(worker),
        slow_copies=ledger.slow_copies.remove(worker),
    )


def move(ledger: Ledger, worker: int) -> Ledger:
    """Out of its set, to be put into another one; a drain notice goes with it."""
    return replace(leave(ledger, worker), leaving=ledger.leaving)


def arrivals(ledger: Ledger) -> NumberSet:
    """Those who may be members of the next generation, apart from those with the state."""
    return ledger.synced - ledger.leaving


def dismiss(ledger: Ledger, phase: Phase) -> tuple[Ledger, tuple[Command, ...]]:
    """Retire those under a drain notice who are of no use where they are: nobody needs them as
    members, nor for the state that they hold."""
    if not ledger.leaving or not isinstance(phase, Running | Waiting):
        return ledger, ()
    useless = ledger.standbys | ledger.syncing | ledger.synced
    if isinstance(phase, Waiting) and not ledger.with_state:  # theirs may be the newest state
        useless = useless - ledger.outdated - ledger.synced
    gone = tuple(useless & ledger.leaving)
    for worker in gone:
        ledger = leave(ledger, worker)
    return ledger, (Retire(gone),) if gone else ()


def lost_members(phase: Active) -> NumberSet:
    """Workers of the membership that are known to be gone."""
    return phase.lost if isinstance(phase, Suspending) else NOBODY


def num_members(phase: Phase) -> int:
    if not isinstance(phase, Active):
        return 0
    gone = len(lost_members(phase))
    return phase.membership.world_size - gone


def is_member(phase: Phase, worker: int) -> bool:
    """A live member of the generation in progress."""
    if not isinstance(phase, Active) or worker not in phase.membership.workers:
        return False
    return worker not in lost_members(phase)


def top_up(decision: Decision, at: float, limits: Limits) -> Decision:
    """Keep `max_workers` + `standby` alive; the pending ones are the demand that Ray sees. Whoever
    is to leave has its replacement asked for already.

    Survivors heal first: a process that starts would take their cores until the next commit.
    """
    ledger, phase, losses = decision.ledger, decision.phase, decision.ledger.losses
    is_healing = losses.failures > 0 and not isinstance(phase, Waiting)
    if ledger.stop or is_healing or at < losses.respawn_at:
        return decision
    alive = sum(map(len, pool_sets(ledger))) + num_members(phase) - len(ledger.leaving)
    barred = losses.barred if at < losses.barred_until else 0
    refused = losses.refused.places if at < losses.refused.until else 0
    refused = min(refused, limits.max_workers - limits.min_workers)  # enough may always come
    missing = limits.max_workers + limits.standby - alive - barred - refused
    if missing <= 0:
        return decision
    begin = ledger.next_worker
    workers = range(begin, begin + missing)
    ledger = replace(
        ledger, next_worker=begin + missing, spawned=ledger.spawned | NumberSet.of(workers)
    )
    reason = decision.reason or f"spawn {names(workers)}: {alive} of {alive + missing} alive"
    return Decision(ledger, phase, (*decision.commands, Spawn(tuple(workers))), reason)
