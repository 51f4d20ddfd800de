"""Replicas of shards, and half precision: runs through losses, one hash with plain training."""

import pytest

from tests.cluster.live import assert_complete, assert_same_bits

pytestmark = pytest.mark.cluster


def test_a_run_of_replicas_loses_a_shard_and_no_step(start, reference):
    """4 workers, 2 replicas; after the loss one rank stands by until there are 4 again."""
    options = {"steps": 100, "set": ["sleep=0.01"], "clip_norm": 1.0}
    with start("Toy", workers="2..4", parallel="hsdp:2", **options) as run:
        before = run.wait_for(lambda s: s["world_size"] == 4 and s["step"] > 5)
        run.kill(rank=1)
        run.wait_for(lambda s: s["generation"] > before["generation"] and s["world_size"] == 3)
        run.wait_for(lambda s: s["world_size"] == 4)
        end = run.finish()
    assert_same_bits(run, end, reference(steps=100, clip_norm=1.0), 100)
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
