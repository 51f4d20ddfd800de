"""The weights and samples of a run do not see its history: real processes, real SIGKILLs."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.live import assert_complete, leftovers

pytestmark = pytest.mark.cluster


def assert_equals_reference(run, end, reference):
    sha256, samples = reference
    assert end["status"] == 0, end["err"]
    assert end["result"]["outcome"] == "succeeded"
    assert end["result"]["lost_steps"] == 0
    assert end["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, end["result"]["steps"])


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_weights_are_equal_bit_for_bit_at_every_world_size(start, reference, workers):
    with start("Toy", workers=workers) as run:
        assert_equals_reference(run, run.finish(), reference())


def test_lost_and_replaced_workers_leave_no_trace_in_the_weights(start, reference):
    options = {"steps": 60, "set": ["sleep=0.2"], "clip_norm": 1.0}
    with start("Toy", workers="2..3", **options) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        run.kill(rank=0)
        fewer = run.wait_for_step(lambda s: s["world_size"] == 2)
        run.wait_for_step(lambda s: s["world_size"] == 3)
        run.kill(rank=1)
        end = run.finish()
        pids = run.seen_pids
    assert_equals_reference(run, end, reference(steps=60, clip_norm=1.0))
    sizes = {m["step"]: m["world_size"] for m in run.lines("metrics.jsonl")}
    assert sizes[fewer["step"] + 1] == 2, "survivors waited for a replacement"
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["process_died"] * 2
    for recovery in end["result"]["recoveries"]:
        parts = ("detect_s", "fence_s", "form_s", "state_s", "first_step_s")
        assert sum(recovery[p] for p in parts) == pytest.approx(recovery["total_s"])
    assert leftovers(pids) == []


@pytest.mark.parametrize(
    "where",
    [
        "apply",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("forward", "backward", "applied")),
    ],
)
def test_a_worker_that_dies_inside_a_step_changes_no_bit(start, reference, tmp_path, where):
    settings = [f"marker='{tmp_path / 'died'}'", f"where={where!r}"]
    with start("DiesOnce", workers="2..3", set=settings) as run:
        end = run.finish()
    assert (tmp_path / "died").exists()
    assert_equals_reference(run, end, reference())


@pytest.mark.slow
def test_fast_reduction_uses_the_same_samples_and_divisor(start, reference):
    with start("Toy", workers=3, reduction="fast", set=["weighted=True"]) as run:
        end = run.finish()
    with start("Toy", "two", workers=2, set=["weighted=True"]) as bitwise:
        bitwise_end = bitwise.finish()
    assert end["status"] == bitwise_end["status"] == 0
    assert run.lines("samples.jsonl") == bitwise.lines("samples.jsonl")
    losses = [[m["loss"] for m in r.lines("metrics.jsonl")] for r in (run, bitwise)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_killed_loader_process_costs_its_worker_and_no_bit(start, reference):
    with start("Toy", workers="1..2", steps=40, set=["sleep=0.1"]) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 5)
        for child in forked_children(status["workers"][0]["pid"]):
            os.kill(child, signal.SIGKILL)
        end = run.finish()
    assert len(end["result"]["recoveries"]) == 1
    assert_equals_reference(run, end, reference(steps=40))


def test_a_follower_saves_the_run_when_the_only_member_is_lost(start, reference):
    small = {"workers": "1..2", "steps": 30, "global_batch": 12, "set": ["sleep=0.8"]}
    with start("Toy", **small) as run:
        run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 3)
        is_seen = False
        while not is_seen:  # it follows for less than a step, and may have become a member unseen
            run.kill(rank=1)
            run.wait_for(lambda s: s["world_size"] == 1)
            status = run.wait_for(
                lambda s: s["world_size"] == 2 or "ready" in [w["state"] for w in s["standby"]]
            )
            is_seen = status["world_size"] == 1
        run.kill(rank=0)
        end = run.finish()
    assert_equals_reference(run, end, reference(steps=30, global_batch=12))


def forked_children(pid):
    """The loader processes of a worker: they share its command line."""
    proc = Path("/proc")
    line = (proc / str(pid) / "cmdline").read_bytes()
    children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    return [int(c) for c in children if (proc / c / "cmdline").read_bytes() == line]


def test_below_min_the_run_waits_and_says_so(start, reference):
    with start("Toy", workers=2, steps=30, set=["sleep=0.05"]) as run:
        run.wait_for(lambda s: s["step"] > 5)
        run.kill(rank=1)
        waiting = run.wait_for(lambda s: s["phase"] == "waiting")
        assert "at least 2 workers" in waiting["reason"]
        end = run.finish()
    assert_equals_reference(run, end, reference(steps=30))


def test_a_warm_standby_takes_over(start, reference):
    with start("Toy", workers=2, standby=1, steps=40, set=["sleep=0.15"]) as run:
        warm = run.wait_for(
            lambda s: s["step"] > 5 and any(w["state"] == "standby" for w in s["standby"])
        )
        known = {w["id"] for w in (*warm["workers"], *warm["standby"])}
        run.kill(rank=0)
        healed = run.wait_for(lambda s: s["world_size"] == 2 and s["generation"] > 1)
        assert {w["id"] for w in healed["workers"]} <= known, "a cold start was waited for"
        end = run.finish()
    assert_equals_reference(run, end, reference(steps=40))


@pytest.mark.slow
def test_a_frozen_worker_is_found_by_its_heartbeats_and_replaced(start, reference):
    with start("Toy", workers="1..2", steps=60, detect_s=1.5, set=["sleep=0.1"]) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2 and s["step"] > 12)
        os.kill(status["workers"][1]["pid"], signal.SIGSTOP)
        run.wait_for(lambda s: s["world_size"] == 1 and s["phase"] == "running")
        end = run.finish()
    assert end["result"]["recoveries"][0]["cause"] == "hung"
    assert_equals_reference(run, end, reference(steps=60))
