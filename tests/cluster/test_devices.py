"""Nodes whose Ray has GPUs that this machine's torch cannot use."""

import os

import pytest
import torch

from tests.cluster.test_lifecycle import one_line

pytestmark = pytest.mark.cluster


@pytest.fixture
def with_gpus(nodes):
    if torch.version.cuda or torch.version.hip or "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("torch is a build for GPUs here, or real ones are hidden")
    nodes.add_node(num_cpus=2, num_gpus=2, object_store_memory=10**8)
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
