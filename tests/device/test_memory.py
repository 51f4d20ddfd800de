"""How much memory of a device is in use at most, by its peak counter."""

import gc

import pytest
import torch
from torch import nn

from tests.device import device
from tests.device.ranks import all_good, run_ranks
from tests.device.training import build, enter, train
from tests.workers import sharded_rig as rig
from workers.reduction import tree_reduction
from workers.resharding import transfer

WIDTH, DEPTH = 64, 16
PARAMETER_BYTES = 4 * DEPTH * WIDTH * WIDTH
"""Of the model: its gradients take as much."""


class Wide(rig.Dense):
    """Many layers, whose activations are small beside them. Its optimizer keeps nothing and takes
    its step in place."""

    def build_model(self):
        return rig.Microbatched(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def batch(self, step, microbatch_id):
        return torch.full((1, WIDTH), 0.1 * (step + microbatch_id))


class Kept(Wide):
    """Its optimizer keeps twice the parameters' memory."""

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.1)


class Deferred(Wide):
    """Built on the meta device."""

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)


@pytest.fixture(autouse=True)
def nothing_left():
    """What earlier tests have left in cycles goes before something is measured, not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def bytes_above(rank, live):
    """What the device has had in use at most, above `live`."""
    torch.sim.synchronize()
    return device.counters(rank).peak_bytes - live


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bitwise_reducer_holds_three_and_a_half_gradients_at_most(world_size, monkeypatch):
    """The gradient itself included, in the first step, which overlaps nothing, and in the next."""
    monkeypatch.setitem(tree_reduction.PIECE_ELEMENTS, "sim", PARAMETER_BYTES // 4 // 32)

    def body(rank, meeting):
        strategy = build(rank, "ddp", "bitwise", Wide(), clip_norm=None)
        group = meeting.group(rank, world_size)
        enter(strategy, group, 0)
        torch.sim.synchronize()
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        train(strategy, group, "ddp", 2, work=Wide())
        return bytes_above(rank, live) / PARAMETER_BYTES

    assert max(all_good(run_ranks(world_size, body))) <= 3.5


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("reduction", "most"), [("bitwise", 4.6), ("fast", 3.6)])
def test_gradients_go_to_their_owners_a_few_at_a_time(reduction, most, world_size, monkeypatch):
    """Of "fsdp-grad-op". The parameters and their gradients, both whole, are part of it."""
    monkeypatch.setitem(tree_reduction.PIECE_ELEMENTS, "sim", PARAMETER_BYTES // 4 // 32)

    def body(rank, meeting):
        strategy = build(rank, "fsdp-grad-op", reduction, Wide(), clip_norm=None)
        group = meeting.group(rank, world_size)
        enter(strategy, group, 0)
        torch.sim.synchronize()
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        train(strategy, group, "fsdp-grad-op", 2, reduction=reduction, work=Wide())
        return bytes_above(rank, live) / PARAMETER_BYTES

    assert max(all_good(run_ranks(world_size, body))) <= most


def test_who_hashes_sharded_weights_holds_a_tensor_twice_at_most():
    def body(rank, meeting):
        strategy = build(rank, "fsdp", "bitwise", Wide())
        enter(strategy, meeting.group(rank, 2), 0)
        torch.sim.synchronize()
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        rig.sha256(strategy)
        return bytes_above(rank, live) / (PARAMETER_BYTES / DEPTH)

    first, other = all_good(run_ranks(2, body))
    assert (first <= 2.1, other <= 0.1) == (True, True), "tensors"


@pytest.mark.parametrize("work", [Wide, Deferred])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("parallel", ["fsdp", "fsdp-grad-op"])
def test_building_and_the_first_reshard_take_a_ranks_share(parallel, world_size, work):
    def body(rank, meeting):
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        strategy = build(rank, parallel, "bitwise", work())
        enter(strategy, meeting.group(rank, world_size), 0)
        return bytes_above(rank, live) / (PARAMETER_BYTES / world_size)

    found = all_good(run_ranks(world_size, body))
    assert max(found) <= 1.2
    assert min(found) >= 1, "else this shows nothing"


def test_a_newcomers_first_shard_takes_its_share_of_the_state(monkeypatch):
    """It comes from the members, a few rows at a time."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4096)

    def body(rank, meeting):
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        strategy = build(rank, "fsdp", "bitwise", Kept())
        if rank < 2:
            group = meeting.group(rank, 2)
            enter(strategy, group, 0)
            train(strategy, group, "fsdp", 1, work=Kept())
        else:
            strategy.forget()
        enter(strategy, meeting.group(rank, 4, generation=2), 1, generation=2)
        return bytes_above(rank, live) / (3 * PARAMETER_BYTES / 4)

    assert max(all_good(run_ranks(4, body))[2:]) <= 1.2


def test_rows_of_offloaded_state_pass_through_the_device_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4096)

    def body(rank, meeting):
        strategy = build(rank, "fsdp", "bitwise", Kept(), offload=True, clip_norm=None)
        if rank < 2:
            group = meeting.group(rank, 2)
            enter(strategy, group, 0)
            train(strategy, group, "fsdp", 1, work=Kept())
        else:
            strategy.forget()
        group = meeting.group(rank, 3, generation=2)
        torch.sim.synchronize()
        device.reset_counters(rank)
        live = device.counters(rank).live_bytes
        enter(strategy, group, 1, generation=2)
        passed = bytes_above(rank, live) / PARAMETER_BYTES  # a rank's share of parameters and state
        train(strategy, group, "fsdp", 1, work=Kept())
        return passed, rig.sha256(strategy)

    def undisturbed(rank, meeting):
        strategy = build(rank, "fsdp", "bitwise", Kept(), clip_norm=None)
        group = meeting.group(rank, 2)
        enter(strategy, group, 0)
        train(strategy, group, "fsdp", 2, work=Kept())
        return rig.sha256(strategy)

    found = all_good(run_ranks(3, body))
    assert max(passed for passed, _ in found) <= 0.2
    assert {sha256 for _, sha256 in found} == set(all_good(run_ranks(2, undisturbed)))
