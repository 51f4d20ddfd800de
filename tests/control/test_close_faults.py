"""Seeded runs whose faults come close together: losses, notices and the controller's death within
a few events of each other, while its successor hears where the workers stand one after another."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from elastic.control.replay import replay
from elastic.control.state import Finished, Limits
from tests.control.fake_cluster import FakeCluster
from tests.control.faults import Faults
from tests.control.sharded_cluster import RareSnapshots, ShardedCluster
from tests.control.test_simulation import Run, check_end, scenario, simulate

KINDS: dict[str, type[FakeCluster]] = {
    "ddp": FakeCluster,
    "sharded": ShardedCluster,
    "rare snapshots": RareSnapshots,
}
PLACES = ("Waiting", "Forming", "Running", "Pausing", "Suspending", "Ending")


def close_faults(seed: int) -> tuple[Limits, Faults]:
    rng = Random(seed)
    limits, faults = scenario(seed)
    faults.kills = rng.choice((2, 3, 5, 8))
    faults.kill_chance = rng.choice((0.002, 0.01))
    faults.burst = rng.choice((0.03, 0.1, 0.3))
    ends, torn = ("paused", "done", "ended"), ("torn", "ahead")
    modes = ((), ("torn",), torn, ("ended",), ends, ("suspended",))
    faults.kill_modes = rng.choice(modes)
    if faults.kill_modes and faults.kill_modes[0] in ("torn", "ended"):
        faults.kill_chance = 0.3
    faults.controller_kills = rng.choice((1, 2, 3))
    faults.controller_chance = rng.choice((0.004, 0.02))
    faults.slow_failover = True
    faults.drains = rng.choice((0, 0, 2, 6))
    faults.drain_chance = 0.005
    return replace(limits, can_save=rng.random() < 0.5), faults


def run_one(kind: type[FakeCluster], seed: int) -> Run:
    limits, faults = close_faults(seed)
    if kind is not FakeCluster:
        limits = replace(limits, is_whole=False, has_copies=kind is ShardedCluster)
    run = simulate(seed, limits, faults, kind)
    check_end(run)
    assert isinstance(run.phase, Finished)
    if run.phase.outcome != "succeeded":  # all were killed between the last step and the end
        assert run.phase.reason.startswith("no member lived"), (seed, run.phase)
    if seed % 10 == 0:
        assert not list(replay(run.journal))
    return run


def check_many(kind: type[FakeCluster], seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        run = run_one(kind, seed)
        seen.update(run.seen)
        assert isinstance(run.phase, Finished)
        seen[run.phase.outcome] += 1
    assert seen["succeeded"] > 0.9 * len(seeds), seen
    assert all(seen[f"{phase} Adopted"] for phase in PLACES), seen
    assert all(seen[f"{phase} WorkerLost"] for phase in PLACES), seen


@pytest.mark.parametrize("kind", KINDS)
def test_faults_close_together_lose_nothing_that_is_on_record(kind: str) -> None:
    others = {"rare snapshots": 200}  # the slow test has none of them
    check_many(KINDS[kind], range(others.get(kind, 100)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.parametrize("begin", range(0, 10_000, 1000))
def test_ten_thousand_runs_with_faults_close_together(kind: str, begin: int) -> None:
    check_many(KINDS[kind], range(begin, begin + 1000))
