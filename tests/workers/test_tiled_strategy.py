"""A new strategy is a new file: one that cuts tensors along two axes trains, loses a rank, saves
and resumes as all do."""

import os
import signal

import pytest

from elastic.protocol.errors import PeerLost
from tests.cluster.jobs.tiles import TILED
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import (
    build,
    catalogue_in,
    enter,
    load,
    save_part,
    sha256,
    train,
    undisturbed,
)

TWICE = TILED.replace("fsdp-grad-op", "hsdp:1")
"""Each tile has as many holders as there are pairs of ranks."""
pytestmark = pytest.mark.usefixtures("place_slowly")
STEPS = 4
LOST_AFTER = 2


@pytest.fixture(scope="module")
def plain(place_slowly) -> str:
    return undisturbed(STEPS)[STEPS]


def test_it_has_the_bits_of_ddp_and_ranks_hold_tiles(plain):
    def body(ranks):
        found = []
        for generation, members in enumerate(([0, 1], [0, 1, 2], [0, 1, 2, 3])):
            if ranks.index not in members:
                continue
            group, strategy = ranks.form(generation, members), build(TILED)
            enter(strategy, group, 0)
            train(strategy, group, TILED, STEPS)
            shape = tuple(strategy.train_state.parameters["embedding.weight"].shape)
            found.append((sha256(strategy), shape))
        return found

    hashes = run_ranks(4, body)
    assert {sha for of_rank in hashes for sha, _ in of_rank} == {plain}
    assert [of_rank[-1][1] for of_rank in hashes] == [(6, 3), (6, 2), (5, 3), (5, 2)]
    assert hashes[2][0][1] == (0, 0), "the third of three is inactive"


def test_a_rank_that_is_killed_leaves_no_trace(plain):
    def body(ranks):
        group, strategy = ranks.form(1, [0, 1, 2, 3]), build(TWICE)
        enter(strategy, group, 0)
        ranks.once_said("abort", group.abandon)

        def die(train_state):
            if train_state.step == LOST_AFTER:
                ranks.meet([0, 1, 2, 3])  # nobody is in that step any more
            if ranks.index == 3 and train_state.step == LOST_AFTER:
                ranks.tell("killed")
                ranks.say("abort")  # on a device nobody else notices
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(PeerLost):
            train(strategy, group, TWICE, STEPS, after_step=die)
        strategy.reset()
        strategy.train_state.buffers.restore_all()
        group = ranks.form(2, [2, 0, 1])
        enter(strategy, group, LOST_AFTER, generation=2)
        train(strategy, group, TWICE, STEPS - strategy.train_state.step)
        return sha256(strategy)

    assert run_ranks(4, body) == [plain] * 3 + ["killed"]


@pytest.mark.parametrize(("saver", "loader"), [(TILED, TWICE), ("fsdp", TILED), (TILED, "ddp")])
def test_checkpoints_go_to_other_meshes_and_strategies(plain, tmp_path, saver, loader):
    def save(ranks):
        group, strategy = ranks.form(1, [0, 1, 2, 3]), build(saver)
        enter(strategy, group, 0)
        train(strategy, group, saver, LOST_AFTER)
        return save_part(strategy, group, str(tmp_path), 1)

    saved = run_ranks(4, save)
    parts, header = [part for part, _ in saved], saved[0][1]
    catalogue_in(str(tmp_path)).publish(LOST_AFTER, 1, parts, header, {})

    def resume(ranks):
        group = ranks.form(1, [0, 1])
        strategy = load(loader, group, str(tmp_path), LOST_AFTER)
        train(strategy, group, loader, STEPS - LOST_AFTER)
        return sha256(strategy)

    assert run_ranks(2, resume) == [plain] * 2
