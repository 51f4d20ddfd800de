"""Replicas of shards in real processes: the bits of plain training, wherever the ranks are."""

import pytest
import torch

from elastic.control.planning import Nodes, plan
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers.ranks import run_ranks
from tests.workers.sharded_rig import (
    NUM_MICROBATCHES,
    build,
    catalogue_in,
    enter,
    load,
    save_part,
    sha256,
    train,
    undisturbed,
)
from workers.distributed.process_group import Alone
from workers.tensors.local import local

pytestmark = pytest.mark.usefixtures("place_slowly")

STEPS = 3
KINDS = (("hsdp:2", 4), ("hsdp:1", 2), ("hsdp:2", 3), ("hsdp:3", 2), ("hsdp:2", 1))
"""Two replicas of two; whole copies; one is inactive; fewer than a replica."""


@pytest.fixture(scope="module")
def plain(place_slowly):
    return undisturbed(STEPS)


NODES = Nodes.of(enumerate("abab"))
HALF = {"precision": "bf16", "activation_checkpointing": True}


@pytest.fixture(scope="module")
def trained(place_slowly):
    """By rank: what became of each kind of run."""

    def body(ranks):
        found = {}
        for generation, (parallel, world_size) in enumerate(KINDS):
            if ranks.index < world_size:
                group = ranks.form(generation, list(range(world_size)))
                strategy = build(parallel)
                enter(strategy, group, 0)
                train(strategy, group, parallel, STEPS)
                found[parallel, world_size] = sha256(strategy)
        strategy = build("hsdp:2", **HALF)
        group = ranks.form(10, [0, 1, 2, 3])
        enter(strategy, group, 0)
        train(strategy, group, "hsdp:2", STEPS)
        found["half"] = sha256(strategy)
        strategy = build("hsdp:2", "fast")
        group = ranks.form(11, [0, 1, 2, 3])
        enter(strategy, group, 0)
        train(strategy, group, "hsdp:2", 1, reduction="fast")
        parameters = strategy.train_state.model.named_parameters()
        found["fast"] = {n: local(p.detach()).tolist() for n, p in parameters}
        return found

    return run_ranks(4, body)


def test_replicas_of_shards_have_the_bits_of_one_rank(plain, trained):
    for rank, found in enumerate(trained):
        for kind in KINDS:
            assert found.get(kind) == (plain[STEPS] if kind[1] > rank else None)


def test_replicas_in_half_precision_and_recomputed_have_the_bits_of_one_rank(trained):
    strategy = build("ddp", **HALF)
    train(strategy, Alone(), "ddp", STEPS)
    assert [found["half"] for found in trained] == [sha256(strategy)] * 4


def test_fast_replicas_hold_equal_rows_and_differ_in_the_order_of_additions_only(trained):
    strategy = build("ddp")
    train(strategy, Alone(), "ddp", 1)
    found = [of_rank["fast"] for of_rank in trained]
    assert found[:2] == found[2:]
    for name, parameter in strategy.train_state.model.named_parameters():
        values = found[0][name] + found[1][name] if parameter.dim() else found[0][name]
        torch.testing.assert_close(
            torch.tensor(values), parameter.detach().cpu(), rtol=1e-3, atol=1e-5
        )


def test_a_whole_replica_that_is_left_needs_no_checkpoint(plain):
    """4 ranks; then 0 and 3 are lost, whose rows the others hold; then 3, one inactive; then
    ranks of two nodes change places so that replicas stay inside of them."""

    def body(ranks):
        hashes = []
        strategy = build("hsdp:2")
        for generation, members in enumerate(([0, 1, 2, 3], [1, 2], [2, 3, 1], [0, 1, 2, 3])):
            if ranks.index not in members:
                strategy.forget()
                continue
            group = ranks.form(generation, members)
            planned = plan(Parallel.of("hsdp:2"), members, NODES)
            enter(strategy, group, min(generation, STEPS), order=planned.order)
            if generation < STEPS:
                train(strategy, group, "hsdp:2", 1)
            hashes.append((sha256(strategy), strategy.mesh.position(group.rank())))
        return hashes

    found = run_ranks(4, body)
    assert found[0] == [(plain[1], 0), (plain[3], 0)]
    assert found[1] == [(plain[1], 2), (plain[2], 0), (plain[3], 1), (plain[3], 2)]
    assert found[2] == [(plain[1], 1), (plain[2], 1), (plain[3], 2), (plain[3], 1)]
    assert found[3] == [(plain[1], 3), (plain[3], 0), (plain[3], 3)]


def test_a_checkpoint_of_replicas_holds_every_row_once(plain, tmp_path):
    place = str(tmp_path)

    def save(ranks):
        group = ranks.form(0, [0, 1, 2, 3, 4])  # one is inactive
        strategy = build("hsdp:2")
        enter(strategy, group, 0)
        train(strategy, group, "hsdp:2", 2)
        return save_part(strategy, group, place, 1)

    saved = run_ranks(5, save)
    catalogue_in(place).publish(2, 1, [part for part, _ in saved], saved[0][1], {})
    kinds = (("ddp", 1), ("fsdp", 3), ("hsdp:2", 4))

    def reload(ranks):
        found = []
        for generation, (parallel, world_size) in enumerate(kinds):
            if ranks.index < world_size:
                group = ranks.form(generation, list(range(world_size)))
                strategy = load(parallel, group, place, 2)
                train(strategy, group, parallel, 1)
                found.append(sha256(strategy))
        return found

    counts = [sum(world_size > rank for _, world_size in kinds) for rank in range(4)]
    assert run_ranks(4, reload) == [[plain[3]] * count for count in counts]


def test_the_mesh_deals_ids_once_to_the_active_ranks():
    for parallel in ("hsdp:1", "hsdp:2", "hsdp:3", "fsdp", "fsdp-grad-op"):
        for world_size in (1, 2, 3, 5, 8):
            mesh = Mesh(Parallel.of(parallel), world_size)
            ids = [mesh.ids(NUM_MICROBATCHES, r) for r in range(world_size)]
            assert sorted(i for own in ids for i in own) == list(range(NUM_MICROBATCHES))
            inactive = [r for r in range(world_size) if mesh.is_inactive(r)]
            assert inactive == list(range(mesh.num_active, world_size))
