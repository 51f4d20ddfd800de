"""Replicas of shards, and half precision: runs through losses, one hash with plain training."""

import os
import signal

import pytest

from tests.cluster.live import assert_complete, assert_same_bits

pytestmark = pytest.mark.cluster


def test_a_run_of_replicas_loses_a_shard_and_no_step(start, reference):
    """4 workers, 2 replicas; after the loss one rank is inactive until there are 4 again."""
    options = {"steps": 40, "set": ["sleep=0.3"], "clip_norm": 1.0}
    with start("Toy", workers="2..4", parallel="hsdp:2", **options) as run:
        before = run.wait_for(lambda s: s["world_size"] == 4 and s["step"] > 5)
        run.kill(rank=1)
        run.wait_for(lambda s: s["generation"] > before["generation"] and s["world_size"] == 3)
        run.wait_for(lambda s: s["world_size"] == 4)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=40, clip_norm=1.0), 40)
    assert end["result"]["lost_steps"] == 0


@pytest.mark.slow
def test_half_precision_with_recomputed_blocks_grows_and_keeps_its_bits(start, reference):
    options = {"precision": "fp16", "activation_checkpointing": True, "clip_norm": 1.0}
    with start("Toy", workers="1..3", parallel="fsdp", set=["sleep=0.01"], **options) as run:
        run.wait_for(lambda s: s["world_size"] > 1)
        end = run.finish()
    assert end["status"] == 0, end["err"]
    sha256, _ = reference(precision="fp16", clip_norm=1.0)
    assert end["result"]["weights_sha256"] == sha256
    assert_complete(run, 30)
    assert {m["applied"] for m in run.lines("metrics.jsonl")} == {True, False}


@pytest.mark.parametrize("parallel", ["hsdp:2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_rank_and_the_controller_that_die_while_the_final_state_is_written_leave_it_right(
    start, tmp_path, reference, parallel
):
    """As rank 0 of three, rank 1 wrote the rows of rank 1 where those of rank 0 belong."""
    folder, steps = tmp_path / "held", 20
    folder.mkdir()
    (folder / "hold").touch()
    settings = [f"folder={str(folder)!r}", f"steps={steps}"]
    options = {"job": "held", "parallel": parallel, "set": settings}
    with start("HeldAtTheEnd", workers=4, steps=steps, **options) as run:
        run.wait_for(lambda s: len(list(folder.iterdir())) == 5)
        status = run.wait_for(lambda s: s["phase"] == "ending")
        run.kill(rank=0)
        os.kill(status["controller"]["pid"], signal.SIGKILL)
        run.wait_for(lambda s: s["controller"]["pid"] != status["controller"]["pid"])
        (folder / "hold").unlink()
        end = run.finish()
    assert_same_bits(run, end, reference(steps=steps), steps)
    assert end["result"]["lost_steps"] == 0
    generation = run.status()["generation"]
    with start("HeldAtTheEnd", workers=2, steps=30, **options) as run:
        end = run.finish()
    assert_same_bits(run, end, reference(), 30)
    assert run.lines("metrics.jsonl")[20]["generation"] > generation, "it does not begin again"
