"""Members that are too few for the memory of a step, and a step that fails on one GPU after
another."""

from dataclasses import replace
from random import Random

import pytest

from elastic.control.commands import Abort, Form, Retire
from elastic.control.events import CollectiveFailed, Committed, Resized, Synced, WorkerLost
from elastic.control.replay import Entry
from elastic.control.resizing import in_force
from elastic.control.state import Finished, Running, Waiting
from elastic.protocol.membership import Membership
from tests.control.fake_cluster import FakeCluster
from tests.control.faults import Faults
from tests.control.sharded_cluster import ShardedCluster
from tests.control.slices import seeds
from tests.control.test_simulation import LIMITS as SIMULATED
from tests.control.test_simulation import check_end, simulate
from tests.control.transitions import ABC, LEDGER, LIMITS, play, some, suspended

AB = Membership(7, (0, 1))
NEEDS_THREE = CollectiveFailed(
    7, 1, "step and state fit over 3 workers, and not over 2: CUDA out of memory", 9.0,
    is_stall=True, too_few=2,
)  # fmt: skip
ONE_OR_MORE = replace(LIMITS, min_workers=1, max_failures=0)


def test_members_without_memory_wait_for_more_of_them_and_nobody_is_lost():
    ledger, phase, commands = play(
        LEDGER, Running(AB), NEEDS_THREE, suspended(0, 40), suspended(1, 40), limits=ONE_OR_MORE
    )
    assert isinstance(phase, Waiting)
    assert phase.reason == (
        "2 of at least 3 workers left: step and state do not fit over 2, step 40"
    )
    assert ledger.with_state == some(0, 1)
    assert ledger.losses.failures == 0
    assert commands[0] == Abort(AB)
    assert not any(isinstance(command, Form | Retire) for command in commands)


def test_the_run_goes_on_once_there_are_as_many_as_it_fitted_over():
    before = replace(LEDGER, standbys=some(2))
    ledger, phase, _ = play(
        before, Running(AB), NEEDS_THREE, suspended(0, 40), suspended(1, 40), limits=ONE_OR_MORE
    )
    assert ledger.syncing == some(2)
    _, _, commands = play(ledger, phase, Synced(2, 9.5), limits=ONE_OR_MORE)
    assert commands == [Form(Membership(8, (0, 1, 2)), 40)]


def test_who_hears_of_it_after_a_peers_complaint_waits_as_well():
    reset = CollectiveFailed(7, 0, "connection reset", 9.0)
    for events in ((reset, NEEDS_THREE), (NEEDS_THREE, reset), (NEEDS_THREE, NEEDS_THREE)):
        answers = suspended(0, 40), suspended(1, 40)
        _, phase, _ = play(LEDGER, Running(AB), *events, *answers, limits=ONE_OR_MORE)
        assert isinstance(phase, Waiting)
        early = (events[0], *answers, events[1])
        _, phase, _ = play(LEDGER, Running(AB), *early, limits=ONE_OR_MORE)
        assert isinstance(phase, Waiting)


def test_where_no_more_may_come_the_run_ends_with_what_it_lacks():
    limits = replace(ONE_OR_MORE, max_workers=2)
    reset = CollectiveFailed(7, 0, "connection reset", 9.0)
    for events in ((NEEDS_THREE,), (reset, NEEDS_THREE)):
        _, phase, _ = play(LEDGER, Running(AB), *events, limits=limits)
        assert phase == Finished("failed", f"{NEEDS_THREE.message}; max_workers is 2")


def test_whoever_asks_for_fewer_is_obeyed():
    ledger, phase, _ = play(
        LEDGER, Running(AB), NEEDS_THREE, suspended(0, 40), suspended(1, 40), limits=ONE_OR_MORE
    )
    assert in_force(ledger, ONE_OR_MORE).min_workers == 3
    _, phase, commands = play(ledger, phase, Resized(1, 2, 10.0), limits=ONE_OR_MORE)
    assert Form(Membership(8, (0, 1)), 40) in commands


# --- GPUs ------------------------------------------------------------------------------------
def broken(worker: int, gpu: str, at: float = 9.0) -> WorkerLost:
    why = f"GPU-{gpu} 0000:01:00.0 H100 has failed: CUDA error: an illegal memory access"
    return WorkerLost(worker, "device_failed", at - 0.1, at, why)


def test_a_step_that_fails_on_two_gpus_one_after_the_other_is_the_programs():
    limits = replace(LIMITS, max_failures=8, min_workers=1)
    ledger, phase, commands = play(
        LEDGER, Running(ABC), broken(0, "a"), suspended(1, 40), suspended(2, 40), limits=limits
    )
    (form,) = (command for command in commands if isinstance(command, Form))
    assert form.membership == Membership(8, (1, 2))
    _, end, _ = play(ledger, Running(form.membership), broken(1, "b"), limits=limits)
    assert isinstance(end, Finished)
    assert end.outcome == "failed"
    assert end.reason.endswith(
        "step 41 has failed on GPU-a 0000:01:00.0 H100 before, it is not the GPU"
    )
    committed = Committed(8, 41, 0.1, 10.0, origin=8)
    _, phase, _ = play(
        ledger, Running(form.membership), committed, broken(1, "b", 11.0), limits=limits
    )
    assert not isinstance(phase, Finished), "of another step it is the GPU's"
    later = 9.0 + limits.cold_patience_s
    _, phase, _ = play(ledger, Running(form.membership), broken(1, "b", later), limits=limits)
    assert not isinstance(phase, Finished), "a script's step lasts from one report to the next"


def test_gpus_that_fail_at_once_or_the_same_one_again_are_losses():
    limits = replace(LIMITS, max_failures=8, min_workers=1)
    _, phase, _ = play(LEDGER, Running(ABC), broken(0, "a"), broken(1, "b"), limits=limits)
    assert not isinstance(phase, Finished)
    ledger, _, _ = play(
        LEDGER, Running(ABC), broken(0, "a"), suspended(1, 40), suspended(2, 40), limits=limits
    )
    _, phase, _ = play(ledger, Running(Membership(8, (1, 2))), broken(1, "a"), limits=limits)
    assert not isinstance(phase, Finished)


# --- simulated ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [FakeCluster, ShardedCluster])
@pytest.mark.parametrize("part", seeds(20, 400))
def test_runs_that_fit_over_so_many_only_end_with_all_steps(part: range, kind) -> None:
    """Workers and controllers die meanwhile, and places come late."""
    num_waited = 0
    for seed in part:
        rng = Random(seed)
        faults = Faults(
            fits_over=rng.choice((2, 3, 4)),
            kills=rng.choice((1, 2, 4)),
            kill_chance=rng.choice((0.01, 0.05)),
            controller_kills=rng.choice((0, 0, 1)),
            slots=rng.choice((((0.0, 99),), ((0.0, 4), (1.0, 2), (6.0, 99)))),
        )
        limits = replace(SIMULATED, min_workers=1, is_whole=kind is FakeCluster)
        run = simulate(seed, limits, faults, kind)
        check_end(run)
        assert isinstance(run.phase, Finished)
        if run.phase.outcome != "succeeded":
            assert run.phase.reason.startswith("no member lived to say the hash"), run.phase
        events = [entry.event for entry in run.journal if isinstance(entry, Entry)]
        num_waited += any(isinstance(e, CollectiveFailed) and e.too_few for e in events)
    assert num_waited, "nobody was ever without memory"
