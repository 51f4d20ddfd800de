"""A new strategy is a new file: one with two axes trains, loses a rank and resumes as all do."""

import os
import signal

import pytest

from elastic.protocol.errors import PeerLost, WrongInput
from tests.cluster.jobs.grid import GRID
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

pytestmark = pytest.mark.usefixtures("place_slowly")
STEPS = 4
LOST_AFTER = 2


@pytest.fixture(scope="module")
def plain(place_slowly) -> str:
    return undisturbed(STEPS)[STEPS]


def test_it_has_the_bits_of_ddp_at_every_world_size_and_when_a_rank_is_killed(plain):
    def body(ranks):
        found = []
        for generation, members in enumerate(([0], [0, 1], [0, 1, 2], [0, 1, 2, 3])):
            if ranks.index not in members:
                continue
            group, strategy = ranks.form(generation, members), build(GRID)
            enter(strategy, group, 0)
            has_a_loss = len(members) == 4
            if has_a_loss:
                ranks.once_said("abort", group.abandon)

            def die(train_state, has_a_loss=has_a_loss):
                if not has_a_loss or train_state.step != LOST_AFTER:
                    return
                ranks.meet([0, 1, 2, 3])  # nobody is in that step any more
                if ranks.index == 3:
                    ranks.tell("killed")
                    ranks.say("abort")  # on a device nobody else notices
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                train(strategy, group, GRID, STEPS, after_step=die)
            except PeerLost:  # in the middle of a step: the others do it again
                assert has_a_loss
                strategy.train_state.buffers.restore_all()
                group = ranks.form(10, [0, 1, 2])
                enter(strategy, group, LOST_AFTER)
                train(strategy, group, GRID, STEPS - strategy.train_state.step)
            found.append(sha256(strategy))
        return found

    hashes = run_ranks(4, body)
    assert hashes == [[plain] * 4, [plain] * 3, [plain] * 2, "killed"]


def test_it_resumes_at_another_world_size_from_its_own_checkpoint_and_from_that_of_another(
    plain, tmp_path
):
    for saver, loader, folder in ((GRID, GRID, "a"), ("fsdp", GRID, "b"), (GRID, "fsdp", "c")):
        place = str(tmp_path / folder)

        def save(ranks, parallel=saver, place=place):
            group, strategy = ranks.form(1, [0, 1]), build(parallel)
            enter(strategy, group, 0)
            train(strategy, group, parallel, LOST_AFTER)
            return save_part(strategy, group, place, 1)

        saved = run_ranks(2, save)
        parts, header = [part for part, _ in saved], saved[0][1]
        catalogue_in(place).publish(LOST_AFTER, 1, parts, header, {})

        def resume(ranks, parallel=loader, place=place):
            group = ranks.form(1, [0, 1, 2, 3])
            strategy = load(parallel, group, place, LOST_AFTER)
            train(strategy, group, parallel, STEPS - LOST_AFTER)
            return sha256(strategy)

        assert run_ranks(4, resume) == [plain] * 4


@pytest.mark.parametrize("name", ["tests.workers.nowhere:build", f"{GRID}_not"])
def test_a_strategy_that_is_not_there_is_named(name):
    with pytest.raises(WrongInput, match=f"parallel='{name}' names no strategy: "):
        build(name)


def test_a_strategy_whose_ranks_hold_the_whole_state_has_no_sharded_axis():
    with pytest.raises(WrongInput, match="holds the whole state, which does not go with 'fsdp'"):
        build(f"fsdp,{GRID}")
