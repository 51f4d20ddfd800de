"""Sharded strategies in real processes: the bits of plain training, whatever the mesh was.

On devices their bits are those of tests/device/test_training.py and test_device_hash.py as well,
which take less long.
"""

import pytest
import torch

from elastic.protocol.layout import Box, Position, TensorLayout, cut
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import (
    NUM_MICROBATCHES,
    Deferred,
    Dense,
    Work,
    build,
    catalogue_in,
    enter,
    load,
    newcomer,
    save_part,
    sha256,
    train,
    undisturbed,
)
from workers.distributed.process_group import Alone
from workers.resharding.assemble import ShardLost
from workers.resharding.moves import Move, moves_of
from workers.tensors.local import local

pytestmark = pytest.mark.usefixtures("place_slowly")
WORLDS = (1, 2, 3)
SHARDED = ("fsdp", "fsdp-grad-op")
STEPS = 3


@pytest.fixture(scope="module")
def plain(place_slowly):
    return undisturbed(2 * STEPS)


def test_every_strategy_at_every_world_size_has_the_bits_of_one_rank(plain):
    def body(ranks):
        found, generation = {}, 0
        for world_size in WORLDS:
            for parallel in SHARDED:
                generation += 1
                if ranks.index < world_size:
                    group = ranks.form(generation, list(range(world_size)))
                    strategy = build(parallel)
                    enter(strategy, group, 0)
                    train(strategy, group, parallel, STEPS)
                    found[parallel, world_size] = sha256(strategy)
        return found

    expected = {(p, w): plain[STEPS] for w in WORLDS for p in SHARDED}
    for rank, found in enumerate(run_ranks(3, body)):
        assert found == {k: v for k, v in expected.items() if k[1] > rank}


class Frozen(Work):
    """As in fine-tuning: a whole block without anything to train."""

    def build_model(self):
        model = super().build_model()
        model.blocks[1].requires_grad_(False)
        return model


def test_a_frozen_block_changes_nothing_at_any_world_size():
    whole = build("ddp", workload=Frozen())
    train(whole, Alone(), "ddp", STEPS, work=Frozen())

    def body(ranks):
        found = []
        for generation, parallel in enumerate(SHARDED):
            for world_size in (1, 2):
                if ranks.index < world_size:
                    group = ranks.form(2 * generation + world_size, list(range(world_size)))
                    strategy = build(parallel, workload=Frozen())
                    enter(strategy, group, 0)
                    train(strategy, group, parallel, STEPS, work=Frozen())
                    found.append(sha256(strategy))
        return found

    first, second = run_ranks(2, body)
    assert {*first, *second} == {sha256(whole)}


class Detached(Work):
    """Blocks of one size, and a backward that one of them is not reached by in each third id."""

    def build_model(self):
        return SkipsOne()

    def batch(self, step, microbatch_id):
        return torch.ones(4, 8)


class SkipsOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, microbatch_id):
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x + (y.detach() if i == 1 and microbatch_id % 3 == 0 else y)
        return x


def test_backwards_that_go_different_ways_are_refused_rather_than_mixed_up():
    def body(ranks):
        group = ranks.form(1, [0, 1])
        strategy = build("fsdp", workload=Detached())
        enter(strategy, group, 0)
        with pytest.raises(ValueError, match="backwards have gone different ways"):
            train(strategy, group, "fsdp", 1, work=Detached())
        return "refused"

    assert run_ranks(2, body) == ["refused", "refused"]


def test_fast_mode_differs_in_the_order_of_additions_only():
    def body(ranks):
        found = {}
        for generation, parallel in enumerate(SHARDED):
            group = ranks.form(generation, [0, 1, 2])
            strategy = build(parallel, "fast")
            enter(strategy, group, 0)
            train(strategy, group, parallel, 1, reduction="fast")
            mine = {
                n: local(p.detach()).clone()
                for n, p in strategy.train_state.model.named_parameters()
            }
            found[parallel] = {n: t.tolist() for n, t in mine.items()}
        return found

    strategy = build("ddp")
    train(strategy, Alone(), "ddp", 1)
    whole = dict(strategy.train_state.model.named_parameters())
    for rank, found in enumerate(run_ranks(3, body)):
        for parallel in SHARDED:
            for name, values in found[parallel].items():
                wanted = whole[name]
                if wanted.dim():
                    rows = cut(wanted.shape[0], 3, rank)
                    wanted = wanted[rows.start : rows.stop]
                torch.testing.assert_close(
                    torch.tensor(values).view(wanted.shape),
                    wanted.detach().cpu(),
                    rtol=1e-3,
                    atol=1e-5,
                )


@pytest.mark.parametrize("parallel", SHARDED)
def test_a_model_that_changes_its_mesh_keeps_its_bits_and_its_identity(plain, parallel):
    """2 ranks, then 3; then two are lost, and who is left knows that rows are."""

    def body(ranks):
        strategy, hashes, identities = build(parallel), [], []
        for generation, members in enumerate(([0, 1], [0, 1, 2], [2])):
            if ranks.index not in members:
                strategy = newcomer(parallel)
                continue
            group = ranks.form(generation, members)
            if len(members) == 1:  # as after a loss: the rows of the others are not there
                with pytest.raises(ShardLost, match=r"nobody holds \[0:.*\] of"):
                    enter(strategy, group, generation)
                continue
            enter(strategy, group, generation)
            train(strategy, group, parallel, 1)
            hashes.append(sha256(strategy))
            identities.append(
                [id(p) for p in strategy.train_state.optimizer.param_groups[0]["params"]]
            )
            assert identities[-1] == [id(p) for p in strategy.train_state.model.parameters()]
            assert set(strategy.train_state.optimizer.state) <= set(
                strategy.train_state.model.parameters()
            )
        return hashes, identities

    first, second, third = run_ranks(3, body)
    assert first[0] == second[0] == plain[1:3]
    assert third[0] == plain[2:3]
    assert first[1][0] == first[1][1]


def test_ranks_that_change_places_move_all_rows(plain):
    def body(ranks):
        group = ranks.form(0, [0, 1, 2])
        strategy = build("fsdp")
        enter(strategy, group, 0)
        train(strategy, group, "fsdp", 2)
        again = ranks.form(1, [2, 0, 1])  # other ranks, other rows
        enter(strategy, again, 2)
        train(strategy, again, "fsdp", 1)
        return sha256(strategy)

    assert run_ranks(3, body) == [plain[3]] * 3


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param((("ddp", 1), ("fsdp", 2), ("fsdp-grad-op", 3)), id="some"),
        pytest.param(
            (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp-grad-op", 3)),
            id="all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_of_any_strategy_and_world_size_loads_into_any_other(plain, tmp_path, kinds):
    def body(ranks):
        parts = {}
        for generation, (parallel, world_size) in enumerate(kinds):
            if ranks.index < world_size:
                group = ranks.form(generation, list(range(world_size)))
                strategy = build(parallel)
                enter(strategy, group, 0)
                train(strategy, group, parallel, STEPS)
                place = f"{tmp_path}/{parallel}-{world_size}"
                parts[parallel, world_size] = save_part(strategy, group, place, 1)
        return parts

    saved = run_ranks(3, body)
    for parallel, world_size in kinds:
        found = [saved[rank][parallel, world_size] for rank in range(world_size)]
        catalogue = catalogue_in(f"{tmp_path}/{parallel}-{world_size}")
        catalogue.publish(STEPS, 1, [part for part, _ in found], found[0][1], {})

    def reload(ranks):
        hashes, generation = [], 0
        for saved_as in kinds:
            for parallel, world_size in kinds:
                generation += 1
                if ranks.index < world_size:
                    group = ranks.form(generation, list(range(world_size)))
                    place = f"{tmp_path}/{saved_as[0]}-{saved_as[1]}"
                    strategy = load(parallel, group, place, STEPS)
                    before = sha256(strategy)
                    train(strategy, group, parallel, STEPS)
                    hashes.append((before, sha256(strategy)))
        return hashes

    counts = [len(kinds) * sum(world_size > rank for _, world_size in kinds) for rank in range(3)]
    expected = [[(plain[STEPS], plain[2 * STEPS])] * count for count in counts]
    assert run_ranks(3, reload) == expected


def test_weights_initialised_on_the_meta_device_do_not_see_the_strategy():
    def body(ranks):
        found = []
        for generation, parallel in enumerate(SHARDED):
            group = ranks.form(generation, [0, 1, 2])
            strategy = build(parallel, workload=Deferred())
            assert all(p.is_meta for p in strategy.train_state.model.parameters() if p.dim())
            enter(strategy, group, 0)
            found.append(sha256(strategy))
            train(strategy, group, parallel, 1)
            found.append(sha256(strategy))
        return found

    strategy = build("ddp", workload=Deferred())
    first = sha256(strategy)
    train(strategy, Alone(), "ddp", 1)
    assert run_ranks(3, body) == [[first, sha256(strategy)] * 2] * 3


def test_a_round_sends_three_times_what_others_need_of_the_parameters():
    def body(ranks):
        group = ranks.form(1, [0, 1])
        strategy = build("fsdp", workload=Dense())
        enter(strategy, group, 0)
        train(strategy, group, "fsdp", 1, work=Dense())
        return strategy.collectives.sent_bytes

    parameters, rounds = 2 * 8 * 8 * 4, NUM_MICROBATCHES // 2
    assert run_ranks(2, body) == [3 * parameters // 2 * rounds] * 2


def test_who_has_no_micro_batch_left_computes_nothing():
    def body(ranks):
        strategy, group = build("fsdp"), ranks.form(1, [0, 1, 2])
        enter(strategy, group, 0)
        forwards = []
        strategy.train_state.model.register_forward_hook(lambda *_: forwards.append(1))
        train(strategy, group, "fsdp", 1)
        return len(forwards)

    assert run_ranks(3, body) == [3, 3, 2]


FIRST, SECOND = Box((0, 0), (2, 2)), Box((2, 0), (2, 2))


def test_rows_go_from_whoever_holds_them_to_their_new_owner_once():
    weight = TensorLayout("w", "float32", (4, 2), (("dp_shard", 0),))
    two, three = Mesh(Parallel.of("fsdp"), 2), Mesh(Parallel.of("fsdp"), 3)
    held = [Position(two, 0), Position(two, 1), None]
    assert moves_of(weight, held, three) == [Move(0, 0, FIRST), Move(1, 1, SECOND)]
    held = [None, Position(three, 0), Position(three, 1)]
    assert moves_of(weight, held, two) == [Move(1, 0, FIRST), Move(2, 1, SECOND)]
    with pytest.raises(LookupError, match=r"nobody holds \[2:4, 0:2\] of w"):
        moves_of(weight, [Position(two, 0), None], two)


def test_ids_are_dealt_once_and_all_ranks_make_as_many_passes():
    for world_size in (1, 2, 3, 8):
        mesh = Mesh(Parallel.of("fsdp"), world_size)
        ids = [mesh.ids(NUM_MICROBATCHES, rank) for rank in range(world_size)]
        assert sorted(i for of_rank in ids for i in of_rank) == list(range(NUM_MICROBATCHES))
        passes = {mesh.num_passes(NUM_MICROBATCHES, rank) for rank in range(world_size)}
        assert passes == {max(len(of_rank) for of_rank in ids)}
