"""Seeded runs of a sharded strategy: peer memory keeps what a lost member held."""

from collections import Counter
from dataclasses import replace

import pytest

from elastic.control.commands import Form
from elastic.control.replay import replay
from elastic.control.state import Finished
from tests.control.fake_group import Group
from tests.control.fake_parts import Rows
from tests.control.faults import Faults
from tests.control.sharded_cluster import (
    LargeStates,
    RareSnapshots,
    ShardedCluster,
    StagesCluster,
)
from tests.control.slices import seeds
from tests.control.test_simulation import check_end, scenario, simulate

NUM_SEEDS = 1200


@pytest.mark.parametrize(
    ("kind", "holder_losses"),
    [(ShardedCluster, 0), (ShardedCluster, 3), (RareSnapshots, 0)],
)
@pytest.mark.parametrize("part", seeds(150, NUM_SEEDS))
def test_sharded_runs_with_faults_end_with_all_steps(
    kind: type[ShardedCluster], holder_losses: int, part: range
) -> None:
    """While anybody who did the newest steps lives and no holder is lost, a run falls back behind
    no step on record, or by at most the interval of its snapshots (see sharded_cluster.py)."""
    seen = ends(kind, holder_losses, part)
    assert seen["returned to copies"] > (len(part) / 12 if kind is RareSnapshots else -1), seen


@pytest.mark.parametrize("part", seeds(50, NUM_SEEDS))
def test_runs_in_stages_with_faults_end_with_all_steps(part: range) -> None:
    seen = ends(StagesCluster, 3, part)
    assert seen["waited for another copy"] > len(part) / 20, seen


def ends(kind: type[ShardedCluster], holder_losses: int, part: range) -> Counter[str]:
    """How runs of these seeds did."""
    seen: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        faults.holder_losses = holder_losses
        limits = replace(limits, is_whole=False, parallel=kind.parallel)
        run = simulate(seed, limits, faults, kind)
        check_end(run)
        assert isinstance(run.phase, Finished)
        seen[run.phase.outcome] += 1
        seen["rolled back in process"] += run.cluster.rollbacks > 0
        seen["returned to copies"] += run.cluster.returns > 0
        seen["lost steps"] += run.account.lost_steps > 0
        reasons = (entry.reason for entry in run.journal)
        seen["waited for another copy"] += any("to copy as well" in reason for reason in reasons)
        if run.phase.outcome != "succeeded":  # all were killed between the last step and the end
            assert run.phase.reason.startswith("no member"), (seed, run.phase)
        if seed % 10 == 0:
            assert not list(replay(run.journal))
    assert seen["succeeded"] > len(part) * 0.98, seen
    return seen


@pytest.mark.parametrize("part", seeds(100, NUM_SEEDS // 4))
def test_runs_with_large_states_end_with_all_steps(part: range) -> None:
    seen: Counter[str] = Counter()
    for seed in part:
        limits, faults = scenario(seed)
        run = simulate(seed, replace(limits, is_whole=False), faults, LargeStates)
        check_end(run)
        assert isinstance(run.phase, Finished)
        seen[run.phase.outcome] += 1
        seen["lost meanwhile"] += run.seen["Forming WorkerLost"] > 0
        if run.phase.outcome != "succeeded":
            assert run.phase.reason.startswith("no member"), (seed, run.phase)
    assert seen["lost meanwhile"] > len(part) / 15, seen


class Hopeless(ShardedCluster):
    """Rows are missing whatever is loaded."""

    def choose(self, group: Group, form: Form) -> Rows | None:
        return None


def test_a_state_whose_rows_are_always_missing_ends_the_run_and_says_so() -> None:
    for seed in range(20):
        limits, _ = scenario(seed)
        run = simulate(seed, replace(limits, is_whole=False), Faults(), Hopeless)
        assert isinstance(run.phase, Finished)
        assert run.phase.outcome == "failed"
        assert "could not get the state of step 0, the last: w" in run.phase.reason
        assert run.phase.reason.endswith(": nobody holds row 3")
