"""Shards in host memory, which changes nothing, bit for bit."""

import pytest
import torch

from tests.workers import where
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import build, enter, sha256, train
from workers.distributed.process_group import Alone
from workers.tensors.local import local

pytestmark = pytest.mark.usefixtures("place")

KINDS = (("fsdp", 1), ("fsdp", 2), ("fsdp-grad-op", 2), ("hsdp:1", 2))


def test_offloaded_shards_have_the_bits_of_one_rank_and_live_on_the_host():
    def body(ranks):
        found = {}
        for generation, (parallel, world_size) in enumerate(KINDS):
            if ranks.index < world_size:
                group = ranks.form(generation, list(range(world_size)))
                strategy = build(parallel, offload=True)
                enter(strategy, group, 0)
                train(strategy, group, parallel, 2)
                sharded = [p for p in strategy.train_state.model.parameters() if p.dim()]
                places = {local(p.detach()).device.type for p in sharded}
                found[parallel, world_size] = (sha256(strategy), places)
        return found

    # A GPU's optimizer has other kernels than the host's.
    kind, is_off = ("fsdp", True) if where.HERE.type == "cuda" else ("ddp", False)
    strategy = build(kind, offload=is_off)
    enter(strategy, Alone(), 0)
    train(strategy, Alone(), kind, 2)
    expected = (sha256(strategy), {torch.device("cpu").type})
    for rank, found in enumerate(run_ranks(2, body)):
        assert found == {kind: expected for kind in KINDS if kind[1] > rank}
