"""Stages on the simulated device, whose messages between two ranks come in order and have no tags:
the bits are those of one rank on the CPU that computes whole micro-batches, before and behind a
loss. Nothing is clipped: the norm's formula is another one on a device (workers/reduction/norm.py).
"""

import os
import signal
from typing import Any

import pytest

from elastic.protocol.errors import PeerLost, StepCancelled
from tests.workers import where
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import enter, sha256
from tests.workers.test_staged_strategy import build, train
from workers.distributed.process_group import Alone

STEPS, LOST_AFTER = 3, 1
PLANS = [("pp:2/GPipe", 2), ("pp:3", 3), ("pp:2,fsdp-grad-op", 4)]
PLANS += [("pp:2/Interleaved1F1B", 2), ("pp:2/ZBVZeroBubble", 4)]
NAMES = ["llama, tied", "deep"]
pytestmark = pytest.mark.usefixtures("on_device")


def undisturbed(name: str) -> str:
    with where.on_cpu():
        strategy = build(name, clip_norm=None)
        enter(strategy, Alone(), 0)
        train(strategy, Alone(), name, STEPS)
        return sha256(strategy)


@pytest.mark.parametrize("name", NAMES)
def test_stages_have_the_bits_of_one_rank(name: str):
    def body(ranks: Ranks) -> list[str]:
        found: list[str] = []
        for generation, (parallel, world_size) in enumerate(PLANS):
            if ranks.index < world_size:
                group = ranks.form(generation, list(range(world_size)))
                strategy = build(name, parallel=parallel, clip_norm=None)
                enter(strategy, group, 0)
                train(strategy, group, name, STEPS)
                found.append(sha256(strategy))
        return found

    results = run_ranks(4, body)
    assert len(results[0]) == len(PLANS)
    assert {sha for of_rank in results for sha in of_rank} == {undisturbed(name)}


def test_survivors_of_a_killed_stage_go_on_with_the_same_bits():
    name = "llama, tied"

    def body(ranks: Ranks) -> str:
        group, strategy = ranks.form(1, [0, 1, 2, 3]), build(name, clip_norm=None)
        enter(strategy, group, 0)
        ranks.once_said("abort", group.abandon)

        def die(state: Any) -> None:
            if state.step == LOST_AFTER:
                ranks.meet([0, 1, 2, 3])
            if state.step == LOST_AFTER and ranks.index == 2:
                ranks.tell("killed")
                ranks.say("abort")  # on a device nobody else notices
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(strategy, group, name, STEPS, die)
        except (PeerLost, StepCancelled):  # in the middle of a step: the others do it again
            strategy.reset()
            strategy.train_state.buffers.restore_all()
            group = ranks.form(2, [0, 1, 3])
            enter(strategy, group, LOST_AFTER, generation=2)
            train(strategy, group, name, STEPS - strategy.train_state.step)
        return sha256(strategy)

    wanted = undisturbed(name)
    assert run_ranks(4, body) == [wanted, wanted, "killed", wanted]
