"""When newcomers that copy ahead what they are likely to get of a model in stages come in: several
that are on their way together, at one boundary."""

from dataclasses import replace

import pytest

from elastic.control.commands import Command, Pause, Spawn, Sync
from elastic.control.events import DrainNotice, Synced, SyncFailed, Tick, WorkerStarted
from elastic.control.state import Running
from elastic.control.transition import transition
from elastic.protocol.mesh import Parallel
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, play, some

STAGES = replace(LIMITS, max_workers=5, is_whole=False, parallel=Parallel.of("pp:2"))
STARTED = replace(LEDGER, spawned=some(3, 4), next_worker=5)
COMING = (WorkerStarted(3, 10.0), WorkerStarted(4, 12.0))


def after(*events, limits=STAGES) -> list[Command]:
    """Of three members and two newcomers: what was decided, but for whom to follow."""
    commands = play(STARTED, Running(ABC), *COMING, *events, limits=limits)[2]
    return [c for c in commands if not isinstance(c, Sync)]


def test_the_first_that_has_copied_waits_for_another_that_still_does():
    ledger, phase, _ = play(STARTED, Running(ABC), *COMING, limits=STAGES)
    decision = transition(ledger, phase, Synced(3, 14.0), STAGES)
    assert decision.commands == ()
    assert decision.reason == "w3 waits for w4 to copy as well"
    assert after(Synced(3, 14.0), Tick(15.0), Synced(4, 16.0)) == [Pause(ABC)]


def test_it_waits_for_as_long_as_it_has_copied_and_a_second_at_least():
    assert after(Synced(3, 14.0), Tick(17.9)) == []
    assert after(Synced(3, 14.0), Tick(18.0)) == [Pause(ABC)]
    assert after(Synced(3, 12.1), Tick(14.1)) == []
    late = (Synced(3, 14.0), Tick(17.0), SyncFailed(4, "gone", 17.5), Tick(17.6))
    assert after(*late) == [Pause(ABC)]
    ledger, phase, _ = play(STARTED, Running(ABC), WorkerStarted(3, 10.0), limits=STAGES)
    soon = (WorkerStarted(4, 10.1), Synced(3, 10.2), Tick(11.1))
    assert play(ledger, phase, *soon, limits=STAGES)[2][1:] == []
    assert play(ledger, phase, *soon, Tick(11.2), limits=STAGES)[2][1:] == [Pause(ABC)]


def test_another_newcomer_does_not_make_it_wait_for_longer():
    more = replace(STAGES, max_workers=6)
    events = (*COMING, Synced(3, 14.0), WorkerStarted(5, 17.0), Synced(4, 17.5), Tick(18.0))
    started = replace(STARTED, spawned=some(3, 4, 5), next_worker=6)
    _, _, commands = play(started, Running(ABC), *events, limits=more)
    assert [c for c in commands if not isinstance(c, Sync)] == [Pause(ABC)]


@pytest.mark.parametrize("gone", [lost(4, 14.5), DrainNotice(4, "drain", 40.0, 14.5)], ids=str)
def test_nobody_waits_for_a_newcomer_that_will_not_come_in(gone):
    commands = after(Synced(3, 14.0), gone, Tick(14.6))
    assert Pause(ABC) in commands


def test_whoever_is_about_to_leave_does_not_wait_for_it():
    notice = DrainNotice(0, "drain", 17.0, 13.0)
    commands = after(notice, Synced(3, 14.0))
    assert commands == [Spawn((5,))]
    assert after(notice, Synced(3, 14.0), Tick(15.0)) == [Spawn((5,)), Pause(ABC)]


def test_its_patience_is_its_own():
    """Not of somebody's who began long before, and is lost."""
    events = (lost(3, 11.0), Tick(11.1), WorkerStarted(4, 50.0))
    ledger, phase, _ = play(STARTED, Running(ABC), COMING[0], *events, limits=STAGES)
    ledger = replace(ledger, spawned=some(5), next_worker=6)
    events = (WorkerStarted(5, 50.5), Synced(4, 51.0))
    ledger, phase, _ = play(ledger, phase, *events, limits=STAGES)
    assert (phase.copying_since, phase.enter_by) == (50.0, 52.0)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_where_a_boundary_ends_nobodys_copy_nobody_waits(parallel):
    limits = replace(STAGES, is_whole=parallel == "ddp", parallel=Parallel.of(parallel))
    commands = after(Synced(3, 14.0), limits=limits)
    assert commands == [Pause(ABC)]
