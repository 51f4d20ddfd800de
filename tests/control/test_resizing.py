"""`elastic scale`, decision by decision, and in simulated runs with faults."""

from collections import Counter
from dataclasses import replace

import pytest

from elastic.control.commands import Form, Keep, Pause, Retire, Spawn, Sync
from elastic.control.events import (
    Joined,
    Kept,
    PartSaved,
    Paused,
    Resized,
    StopRequested,
    Synced,
    Tick,
    WorkerStarted,
)
from elastic.control.replay import replay
from elastic.control.resizing import in_force
from elastic.control.state import Finished, Forming, Pausing, Running, Waiting
from elastic.protocol.membership import Membership
from tests.control.faults import Faults
from tests.control.sharded_cluster import ShardedCluster
from tests.control.slices import seeds
from tests.control.test_simulation import check_end, scenario, simulate
from tests.control.transitions import ABC, LEDGER, LIMITS, play, some

FEWER, MORE = Resized(1, 2, 10.0), Resized(2, 5, 10.0)


def joined(generation: int, size: int, at: float = 12.0) -> list[Joined]:
    return [Joined(generation, rank, 0.0, at) for rank in range(size)]


def paused(size: int, at: float = 11.0) -> list[Paused]:
    return [Paused(7, rank, 44, at) for rank in range(size)]


def test_who_is_too_many_leaves_at_the_next_boundary_and_is_not_replaced():
    ledger, phase, commands = play(LEDGER, Running(ABC), FEWER)
    assert (phase, commands) == (Pausing(ABC), [Pause(ABC)])
    two = Membership(8, (0, 1))
    ledger, phase, commands = play(ledger, phase, *paused(3))
    assert commands == [Form(two, 44)]
    ledger, phase, commands = play(ledger, phase, *joined(8, 2), Tick(13.0), Tick(90.0))
    assert (phase, commands) == (Running(two), [Retire((2,))])
    assert (ledger.standbys, ledger.leaving, ledger.losses.failures) == (some(), some(), 0)


def test_more_are_asked_for_at_once_and_enter():
    ledger, phase, commands = play(LEDGER, Running(ABC), MORE)
    assert (phase, commands) == (Running(ABC), [Spawn((3, 4))])
    news = [WorkerStarted(3, 11.0), WorkerStarted(4, 11.0), Synced(3, 12.0)]
    ledger, phase, commands = play(ledger, phase, *news)
    assert commands == [Sync(3, 2), Sync(4, 0), Pause(ABC)]
    ledger, phase, commands = play(ledger, phase, Synced(4, 12.5), *paused(3, 13.0))
    assert commands == [Form(Membership(8, (0, 1, 2, 3, 4)), 44)]


def test_those_that_are_only_asked_for_go_first_and_what_they_were_to_take_is_free():
    ledger = replace(LEDGER, spawned=some(3, 4), next_worker=5)
    limits = replace(LIMITS, max_workers=5)
    ledger, phase, commands = play(ledger, Running(ABC), Resized(2, 4, 10.0), limits=limits)
    assert (phase, commands) == (Running(ABC), [Retire((4,))])
    assert ledger.spawned == some(3)
    _, _, commands = play(ledger, phase, WorkerStarted(4, 10.1), limits=limits)
    assert commands == [Retire((4,))], "its word was on the way"


def test_standbys_stay_and_others_outside_go():
    limits = replace(LIMITS, standby=1)
    ledger = replace(LEDGER, standbys=some(3), syncing=some(4), next_worker=5)
    ledger, _, commands = play(ledger, Running(ABC), Resized(1, 3, 10.0), limits=limits)
    assert (commands, ledger.syncing, ledger.standbys) == ([Retire((3,))], some(4), some())


def test_a_run_that_waits_goes_on_with_whom_it_has():
    _, phase, commands = play(replace(LEDGER, with_state=some(1)), Waiting("few"), FEWER)
    assert commands == [Form(Membership(8, (1,)), 40), Spawn((3,))]
    assert isinstance(phase, Forming)


def test_too_many_with_the_state_do_not_all_form():
    ledger = replace(LEDGER, with_state=some(0, 1, 2), next_worker=3)
    limits = replace(LIMITS, min_workers=4, max_workers=4)
    ledger, phase, commands = play(ledger, Waiting("few"), FEWER, limits=limits)
    assert commands == [Form(Membership(8, (0, 1)), 40)]
    _, phase, commands = play(ledger, phase, *joined(8, 2), limits=limits)
    assert commands == [Retire((2,))]


def test_a_state_that_only_leavers_hold_is_saved_first():
    limits = replace(LIMITS, is_whole=False, can_save=True)
    ledger, phase, _ = play(LEDGER, Running(ABC), FEWER, limits=limits)
    ledger, phase, commands = play(ledger, phase, *paused(3), limits=limits)
    assert commands == [Keep(ABC)]
    saved = [PartSaved(7, rank, 44, 12.0) for rank in range(3)]
    kept = [Kept(7, rank, 12.0) for rank in range(3)]
    ledger, phase, commands = play(ledger, phase, *saved, *kept, limits=limits)
    assert commands[-1] == Form(Membership(8, (0, 1)), 44)


def test_what_was_asked_last_is_in_force():
    ledger, phase, commands = play(LEDGER, Running(ABC), MORE, Resized(3, 3, 10.5))
    assert commands == [Spawn((3, 4)), Retire((3, 4))]
    assert (phase, ledger.leaving) == (Running(ABC), some())
    assert in_force(ledger, LIMITS) == replace(LIMITS, min_workers=3, max_workers=3)
    assert in_force(LEDGER, LIMITS) is LIMITS


def test_a_run_that_ends_is_left_alone():
    stop = StopRequested("SIGINT", 9.0)
    ledger, phase, _ = play(LEDGER, Running(ABC), stop, *paused(3))
    assert play(ledger, phase, FEWER) == (ledger, phase, [])


@pytest.mark.parametrize("kind", ["whole", "sharded"])
@pytest.mark.parametrize("part", seeds(75, 1500))
def test_runs_that_are_resized_among_faults_end_with_all_steps(part: range, kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        limits = replace(limits, can_save=seed % 2 == 0, is_whole=kind == "whole")
        faults.resizes = 1 + seed % 5
        faults.controller_kills = int(seed % 3 == 0)
        cluster = {"sharded": ShardedCluster}.get(kind)
        run = simulate(seed, limits, faults, *([cluster] if cluster else []))
        check_end(run)
        seen.update(run.seen)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":
            reason = run.phase.reason
            assert "resume the run" in reason or reason.startswith("no member"), (seed, run.phase)
        if seed % 10 == 0:
            assert not list(replay(run.journal))
    for phase in ("Waiting", "Running", "Suspending"):
        assert seen[f"{phase} Resized"] > len(part) / 120, seen


@pytest.mark.parametrize("part", seeds(75, 1000))
def test_resizes_alone_are_no_failures_and_lose_no_step(part: range) -> None:
    for seed in part:
        limits = replace(scenario(seed)[0], max_failures=0, steps=40)
        run = simulate(seed, limits, Faults(resizes=4))
        check_end(run)
        assert isinstance(run.phase, Finished)
        assert run.phase.outcome == "succeeded", (seed, run.phase)
        assert (run.account.lost_steps, run.account.recoveries) == (0, ()), seed
