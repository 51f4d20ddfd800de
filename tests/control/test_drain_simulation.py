"""Seeded runs whose workers get drain notices: alone, together, with losses, below the minimum."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from elastic.control.commands import Form, Retire
from elastic.control.events import Adopted
from elastic.control.replay import Entry, replay
from elastic.control.state import Finished, Limits
from tests.control.faults import Faults
from tests.control.sharded_cluster import ShardedCluster
from tests.control.slices import seeds
from tests.control.test_simulation import check_end, scenario, simulate


def notices(seed: int, faults: Faults) -> Faults:
    dice = Random(seed)
    faults.drains = dice.choice((1, 2, 4, 8))
    faults.drain_chance = dice.choice((0.002, 0.01, 0.2))
    return faults


@pytest.mark.parametrize("part", seeds(200, 2400))
def test_notices_and_losses_together_cost_no_worker_and_the_run_ends_with_all_steps(
    part: range,
) -> None:
    seen: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        faults = notices(seed, faults)
        faults.controller_kills = int(seed % 5 == 0)
        limits = replace(limits, can_save=seed % 2 == 0)
        run = simulate(seed, limits, faults)
        check_end(run)
        seen.update(run.seen)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":  # killed between the last step and the end
            assert run.phase.reason.startswith("no member lived to say the hash"), (seed, run.phase)
        if seed % 10 == 0:
            assert not list(replay(run.journal))
    for phase in ("Waiting", "Forming", "Running", "Pausing", "Suspending"):
        assert seen[f"{phase} DrainNotice"] > len(part) / 120, seen


@pytest.mark.parametrize("part", seeds(150, 1500))
def test_drains_alone_are_no_failures_and_lose_no_step(part: range) -> None:
    """As long as the notice is long enough for a replacement, of which there is one."""
    for seed in part:
        limits = replace(scenario(seed)[0], can_save=seed % 2 == 0)
        faults = notices(seed, Faults(notice_s=(60.0,)))
        run = simulate(seed, replace(limits, max_failures=0), faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        assert run.phase.outcome == "succeeded", (seed, run.phase)
        assert (run.account.lost_steps, run.account.recoveries) == (0, ()), seed
        assert run.ledger.losses.failures == 0


@pytest.mark.parametrize("part", seeds(100, 200))
def test_a_state_that_only_leavers_hold_is_saved_and_outlives_them(part: range) -> None:
    """There is no slot for a replacement while they live."""
    num_kept = 0
    for seed in part:
        limits, _ = scenario(seed)
        faults = notices(seed, Faults(notice_s=(5.0,), slots=((0.0, limits.min_workers),)))
        faults.drains, faults.drain_chance = 8, 0.004
        limits = replace(limits, steps=150, max_failures=0, can_save=True)
        run = simulate(seed, limits, faults)
        check_end(run)
        assert isinstance(run.phase, Finished)
        is_unlucky = run.phase.reason.startswith("no member lived to say the hash")
        assert run.phase.outcome == "succeeded" or is_unlucky, (seed, run.phase)
        assert run.account.lost_steps == 0, seed
        num_kept += len(run.cluster.kept)
    assert num_kept > 0.15 * len(part)


@pytest.mark.parametrize("part", seeds(100, 800))
def test_short_notices_are_no_failures_either(part: range) -> None:
    for seed in part:
        limits, _ = scenario(seed)
        run = simulate(
            seed, replace(limits, max_failures=0), notices(seed, Faults(notice_s=(5.0, 8.0)))
        )
        check_end(run)
        assert isinstance(run.phase, Finished)
        is_unlucky = run.phase.reason.startswith("no member lived to say the hash")
        assert run.phase.outcome == "succeeded" or is_unlucky, (seed, run.phase)


@pytest.mark.parametrize("part", seeds(100, 800))
def test_sharded_runs_with_notices_end_with_all_steps(part: range) -> None:
    for seed in part:
        limits, faults = scenario(seed)
        limits: Limits = replace(limits, is_whole=False, can_save=seed % 2 == 0)
        run = simulate(seed, limits, notices(seed, faults), ShardedCluster)
        check_end(run)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":
            reason = run.phase.reason
            assert "resume the run" in reason or reason.startswith("no member"), (seed, run.phase)


@pytest.mark.parametrize("part", seeds(100, 300))
def test_shards_are_held_when_they_leave_so_that_no_step_is_lost(part: range) -> None:
    for seed in part:
        limits = replace(scenario(seed)[0], is_whole=False, has_copies=True, max_failures=0)
        faults = notices(seed, Faults(notice_s=(60.0,)))
        run = simulate(seed, replace(limits, can_save=True), faults, ShardedCluster)
        check_end(run)
        assert isinstance(run.phase, Finished)
        assert run.phase.outcome == "succeeded", (seed, run.phase)
        assert run.account.lost_steps == 0, seed
        assert run.cluster.rollbacks == 0, "the copies are enough"


def test_who_was_told_to_end_is_hardly_ever_a_member_under_the_next_controller() -> None:
    """The controller dies before the word goes out; the journal has it."""
    num_deaf = num_again = 0
    for seed in range(40):
        limits = replace(scenario(seed)[0], min_workers=1, max_failures=0, steps=20)
        faults = Faults(drains=4, drain_chance=0.02, controller_kills=2, controller_chance=0.0)
        faults.dies_retiring = True
        run = simulate(seed, limits, faults)
        check_end(run)
        told: set[int] = set()
        again: set[int] = set()
        for before, after in pairwise(run.journal):
            if isinstance(after, Entry) and isinstance(after.event, Adopted):
                there = {s.worker for s in after.event.standings}
                for command in before.commands:
                    told |= there & set(command.workers) if isinstance(command, Retire) else set()
            for command in after.commands:
                if isinstance(command, Form):
                    again |= told & set(command.membership.workers)
        num_deaf, num_again = num_deaf + len(told), num_again + len(again)
    # who alone holds the state, or is to load it, is needed once more
    assert num_again <= num_deaf / 20, (num_again, num_deaf)
