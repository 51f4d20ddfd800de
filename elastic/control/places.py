"""Where another worker might be lost in the same way, and when one is asked for again.

How a run goes on without the lost one is recovery.py's.
"""

from dataclasses import replace

from elastic.control.detection.patience import lost_at, remember
from elastic.control.events import WorkerLost
from elastic.control.pool import names, num_members
from elastic.control.state import DeviceFault, Forming, Ledger, Limits, Phase, Refused

MAX_BACKOFF_S = 60
BARRING = ("unreachable", "device_failed")
"""A replacement may come to the same place: it is not asked for at once."""
MAX_REFUSED_S = 3600
"""Machines that are unfit stay so, and each try makes the members form again. But others may have
come."""


def remember_place(ledger: Ledger, phase: Phase, event: WorkerLost, limits: Limits) -> Ledger:
    """That machine, that part of a step, or a state that is too large for a newcomer."""
    if event.cause in BARRING:
        barred = ledger.losses.barred + 1 if event.at < ledger.losses.barred_until else 1
        ledger = ledger.with_losses(barred=barred, barred_until=event.at + MAX_BACKOFF_S)
    if event.cause == "device_failed":
        ledger = remember_device(ledger, event, limits.cold_patience_s)
    if event.cause == "unfit" and num_members(phase) > limits.min_workers:
        ledger = refuse(ledger, event.at)  # else its loss counts, with no step that renews
    if event.slow_in is not None:
        costly = remember(ledger.losses.costly, event.slow_in, event.worker)
        ledger = ledger.with_losses(costly=costly)
    if isinstance(phase, Forming) and event.worker in phase.newcomers:
        ledger = back_off(ledger, event.at)
    return ledger


def remember_device(ledger: Ledger, event: WorkerLost, within_s: float) -> Ledger:
    """Several GPUs may fail at once with what connects them. Those that fail one after the other,
    in attempts at the same step, are in order; a script's may last for days."""
    device, known = event.why.partition(" has failed")[0], ledger.losses.device_fault
    fault = DeviceFault(ledger.step, ledger.generation, device, at=event.at)
    if known.step == fault.step and event.at < known.at + within_s:
        is_another = known.generation != fault.generation and known.device != device
        fault = replace(known, then=device) if is_another else known
    return ledger.with_losses(device_fault=fault)


def refuse(ledger: Ledger, at: float) -> Ledger:
    """One more place stays empty, twice as long as after the one refused before."""
    known = ledger.losses.refused
    in_a_row, places = known.in_a_row + 1, known.places if at < known.until else 0
    until = at + min(MAX_BACKOFF_S << min(known.in_a_row, 6), MAX_REFUSED_S)
    return ledger.with_losses(refused=Refused(in_a_row, places + 1, max(until, known.until)))


def back_off(ledger: Ledger, at: float) -> Ledger:
    """A worker has failed before it took part, and so may the next one."""
    stillborn = ledger.losses.stillborn + 1
    return ledger.with_losses(stillborn=stillborn, respawn_at=at + back_off_s(stillborn))


def back_off_s(stillborn: int) -> float:
    return min(2 ** min(stillborn, 6), MAX_BACKOFF_S) / 2


def toll(ledger: Ledger, event: WorkerLost) -> str:
    """Whom the place has cost where the worker was lost; empty if that is not why."""
    if event.slow_in is None:
        return ""
    lost = lost_at(ledger.losses.costly, event.slow_in)
    return f"; {event.slow_in} took the life of {names(lost)}"


def emptied(ledger: Ledger, event: WorkerLost) -> str:
    """For how long the place of an unfit machine is; "" if it is filled as any other one."""
    left_s = ledger.losses.refused.until - event.at
    is_barred = event.cause == "unfit" and left_s > 0
    return f"; nobody is asked for in its place for {left_s:.0f} s" if is_barred else ""


def for_the_next(ledger: Ledger, event: WorkerLost, limits: Limits) -> str:
    """What a replacement is given, or has to wait for; empty: nothing out of the usual."""
    if event.slow_in is not None:
        return f"{toll(ledger, event)}: the next one there has {limits.cold_patience_s:g} s"
    return emptied(ledger, event)
