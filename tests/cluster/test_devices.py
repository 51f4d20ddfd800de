"""Nodes whose Ray has GPUs that this machine's torch cannot use."""

import os

import pytest
import torch

from elastic.control.places import MAX_BACKOFF_S
from tests.cluster.faults.test_table import AT, assert_conforms, run_with
from tests.cluster.test_lifecycle import one_line

pytestmark = pytest.mark.cluster


@pytest.fixture
def with_gpus(nodes):
    if torch.version.cuda or torch.version.hip or "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("torch is a build for GPUs here, or real ones are hidden")
    nodes.add_node(num_cpus=4, num_gpus=4, object_store_memory=10**8)
    return {"address": nodes.address, "workers": 2}


def test_a_run_on_gpus_that_its_torch_cannot_use_trains_on_cpus_and_says_why(start, with_gpus):
    with start("Toy", steps=20, set=["sleep=0.05"], device="auto", **with_gpus) as run:
        status = run.wait_for(lambda s: s["world_size"] == 2)
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert "is a build without CUDA: the run trains on CPUs" in end["err"]
    assert [w["device"] for w in status["workers"]] == ["cpu", "cpu"]


def test_who_asks_for_such_gpus_is_refused_before_anything_is_made(start, with_gpus):
    with start("Toy", device="cuda", **with_gpus) as run:
        end = run.finish()
    assert end["status"] == 2
    assert "is a build without CUDA; install one with CUDA" in one_line(end["err"])
    assert not run.directory.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("instant", "strategy"),
    [
        *(("forward", "ddp"), ("backward", "fsdp"), ("collective", "fsdp")),
        *(("copy", "fsdp"), ("save", "ddp"), ("save", "fsdp")),
    ],
)
def test_a_gpu_that_fails_costs_no_step_and_its_place_stays_empty(
    instant, strategy, start, tmp_path, reference, with_gpus
):
    """The copy is that of the thread which keeps a shard for others, the save the saver's."""
    placed = {**with_gpus, "workers": "2..3", "device": "auto"}
    end, run = run_with([("gpu", instant, AT)], strategy, start, tmp_path, **placed)
    assert_conforms(run, end, reference)
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["device_failed"]
    lines = [line for line in run.lines("journal.jsonl") if "entry" in line]
    kinds = [(line["entry"].get("event") or {}).get("type") for line in lines]
    after = lines[kinds.index("WorkerLost") :]
    after = [line["entry"] for line in after if line["at"] < after[0]["at"] + MAX_BACKOFF_S]
    assert max(entry["event"].get("step", 0) for entry in after) > AT, "the others have gone on"
    asked = [c["type"] for entry in after for c in entry["commands"]]
    assert "Form" in asked
    assert "Spawn" not in asked, "nobody is asked for in its place for a minute"
