"""A device that does not let go of a group: its worker is lost, and the others go on."""

import os
import threading

import pytest
import torch

from tests.workers import where
from tests.workers.ranks import DEADLINE_S, run_ranks
from tests.workers.sharded_rig import build, sha256, train
from workers.distributed.process_group import Alone, leave

ABORT_S = 0.1


@pytest.mark.usefixtures("on_device")
def test_a_rank_whose_abort_hangs_is_lost_and_the_others_have_the_bits_of_one():
    def body(ranks):
        strategy, group = build("ddp"), ranks.form(0, [0, 1, 2])
        train(strategy, group, "ddp", 1)
        if ranks.index == 1:  # its kernels never end
            is_over = threading.Event()

            def end_itself(why):
                ranks.tell(why)
                is_over.set()

            group.backend.abort = lambda *_: threading.Event().wait(DEADLINE_S)
            group.abort_s, group.on_stuck = ABORT_S, end_itself
            leave(group)
            assert is_over.wait(DEADLINE_S)
            os._exit(1)
        group.all_reduce(torch.ones(4, device=where.HERE))  # which the others wait for in vain
        leave(group)
        group = ranks.form(1, [0, 2])
        train(strategy, group, "ddp", 1)
        leave(group)
        return sha256(strategy)

    alone = build("ddp")
    train(alone, Alone(), "ddp", 2)
    first, told, last = run_ranks(3, body)
    assert first == last == sha256(alone)
    assert "NCCL's abort of group 0 hangs" in told, told
