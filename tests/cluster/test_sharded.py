"""Sharded runs: the bits of DDP at every world size, through growth, losses and checkpoints."""

import os
import signal

import pytest

from tests.cluster.hosts import command_of
from tests.cluster.live import assert_complete, assert_same_bits, leftovers
from tests.cluster.processes import parent, running

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("fsdp-grad-op", marks=pytest.mark.slow)])
def test_a_sharded_run_that_grows_and_loses_members_loses_no_step(start, reference, parallel):
    """There is no checkpoint to go back to: the lost rows come from peer memory."""
    options = {"steps": 40, "set": ["sleep=0.3"], "clip_norm": 1.0}
    with start("Toy", workers="2..3", parallel=parallel, **options) as run:
        for rank in (1, 0):
            before = run.wait_for_step(lambda s: s["world_size"] == 3 and s["step"] > 5)
            run.kill(rank)
            run.wait_for(lambda s, g=before["generation"]: s["generation"] > g)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=40, clip_norm=1.0), 40)
    recoveries = [(r["cause"], r["lost_steps"]) for r in end["result"]["recoveries"]]
    assert recoveries == [("process_died", 0)] * 2
    assert end["result"]["lost_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "apply", "applied"])
def test_a_sharded_worker_that_dies_inside_a_step_changes_no_bit(start, reference, tmp_path, where):
    settings = [f"marker='{tmp_path / 'died'}'", f"where={where!r}"]
    with start("DiesOnce", workers="2..3", parallel="fsdp", set=settings) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert (tmp_path / "died").exists()
    assert_same_bits(run, end, reference(), 30)
    assert end["result"]["lost_steps"] == 0


def test_a_sharded_worker_that_dies_at_the_end_takes_nothing_along(start, reference, tmp_path):
    """The others get its rows once more, and write the final state."""
    settings = [f"marker='{tmp_path / 'died'}'"]
    with start("DiesAtEnd", workers=3, parallel="fsdp", set=settings) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert (tmp_path / "died").exists()
    assert end["result"]["weights_sha256"] == reference()[0]
    assert end["result"]["lost_steps"] == 0
    assert_complete(run, 30)


@pytest.mark.slow
def test_a_sharded_run_resumes_with_another_number_of_workers(start, reference):
    with start("Toy", workers=2, parallel="fsdp", steps=20) as run:
        first = run.finish()
    with start("Toy", workers=3, parallel="fsdp", steps=30) as run:
        second = run.finish()
    assert first["status"] == second["status"] == 0, second["err"]
    sha256, samples = reference()
    assert second["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_state_that_takes_longer_than_forming_may_starts_and_resumes(start):
    """At first 12 s, and 6 s from the checkpoint; the members have 5 s to meet."""
    ends = []
    for name, steps, seconds in (("quick", 8, 0.0), ("run", 4, 6.0), ("run", 8, 6.0)):
        options = {"workers": 2, "parallel": "fsdp", "detect_s": 0.5, "set": [f"seconds={seconds}"]}
        with start("Large", name, steps=steps, **options) as run:
            ends.append(run.finish())
        assert ends[-1]["status"] == 0, ends[-1]["err"]
        assert ends[-1]["result"]["generations"] == 1
        assert ends[-1]["result"]["recoveries"] == []
    quick, at_first, resumed = (e["result"]["weights_sha256"] for e in ends)
    assert at_first != resumed == quick
    assert_complete(run, 8)


@pytest.mark.slow
def test_a_sharded_evaluation_with_uneven_batches_does_not_see_the_world_size(start):
    """Seven batches over two ranks: one of them evaluates an echo."""
    found = []
    for parallel, workers in (("ddp", 1), ("fsdp", 2), ("fsdp-grad-op", 2)):
        options = {"workers": workers, "parallel": parallel, "steps": 6, "eval_every": 3}
        with start("Evaluates", f"{parallel}-run", **options) as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        lines = [(m["loss"], m["user"]) for m in run.lines("metrics.jsonl")]
        found.append((end["result"]["weights_sha256"], lines))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_member_that_freezes_in_a_sharded_pass_is_replaced(start, reference):
    """Its peers wait for its rows in the middle of a forward or backward."""
    options = {"steps": 60, "detect_s": 1.5, "set": ["sleep=0.01"]}
    with start("Toy", workers="2..3", parallel="fsdp", **options) as run:
        before = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        pid = next(w["pid"] for w in before["workers"] if w["rank"] == 1)
        os.kill(pid, signal.SIGSTOP)
        run.wait_for(lambda s: s["generation"] > before["generation"] and s["world_size"] == 2)
        end = run.finish()
    assert end["status"] == 0, end["err"]
    sha256, samples = reference(steps=60)
    assert end["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["hung"]
    assert end["result"]["lost_steps"] == 0


@pytest.mark.slow
def test_a_frozen_holder_is_replaced_before_a_worker_needs_it(start, reference):
    """There is no checkpoint: only a new holder can have what the lost worker had."""
    options = {"steps": 180, "detect_s": 3.0, "set": ["sleep=0.02"]}
    with start("Toy", workers="2..3", parallel="fsdp", **options) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        (frozen,) = holders_of(run)
        os.kill(frozen, signal.SIGSTOP)
        run.wait_for(lambda s: "not protected by peer memory since step" in s["reason"])
        run.wait_for(lambda s: any("unprotected_s" in told for told in unprotected(run)))
        assert not leftovers([frozen])
        run.kill(rank=1)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=180), 180)
    assert end["result"]["lost_steps"] == 0
    (lost,) = [told for told in unprotected(run) if "lost_holder" in told]
    assert lost["reason"] == "it has not answered for 3 s"


def holders_of(run):
    node = parent(run.status()["controller"]["pid"])
    return [
        p for p in running() if parent(p) == node and command_of(p).startswith("ray::BackupServer")
    ]


def unprotected(run):
    return [line["unprotected"] for line in run.lines("journal.jsonl") if "unprotected" in line]


@pytest.mark.slow
def test_snapshots_at_an_interval_cost_at_most_the_interval(start, reference):
    options = {"steps": 90, "snapshot_every": 10, "set": ["sleep=0.01"]}
    with start("Toy", workers="2..3", parallel="fsdp", **options) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and 4 < s["step"] % 10 < 8)
        run.kill(rank=1)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=90), 90)
    assert 0 < end["result"]["lost_steps"] <= 10
    assert len(run.lines("metrics.rolledback.jsonl")) == end["result"]["lost_steps"]
