"""Every strategy trains on the device to the bits that it has on the CPU.

There is no race and no touch by the host: the fixture looks.
"""

import functools

import pytest
import torch

from tests.device import device
from tests.device.ranks import all_good, run_ranks
from tests.device.training import trained_on_cpu, trained_on_device
from tests.workers import sharded_rig as rig
from workers.distributed.process_group import Alone

STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op")
STEPS = 2


@pytest.fixture(scope="module")
def plain():
    """The hash of one rank on the CPU without sharding. Nothing is clipped: the norm's formula is
    another one on a device (workers/reduction/norm.py)."""
    strategy = rig.build("ddp", clip_norm=None)
    rig.train(strategy, Alone(), "ddp", STEPS)
    return rig.sha256(strategy)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("parallel", [*STRATEGIES, "hsdp:2"])
def test_bitwise_has_the_bits_of_one_rank_on_the_cpu(plain, parallel, world_size):
    def body(rank, meeting):
        how = parallel, "bitwise", STEPS, rig.Work()
        return trained_on_device(rank, meeting, world_size, *how, clip_norm=None)

    assert all_good(run_ranks(world_size, body)) == [plain] * world_size


class Complex(rig.Work):
    """Its parameter is complex."""

    def build_model(self):
        return Lengths()

    def build_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def batch(self, step, microbatch_id):
        return torch.arange(8.0).view(2, 4) * (step + microbatch_id + 1)


class Lengths(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x, microbatch_id):
        return x * self.numbers.abs()  # the device knows no conjugates


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("parallel", STRATEGIES)
def test_complex_parameters_are_sent_as_real_numbers(parallel, world_size):
    """NCCL has no others."""

    def body(rank, meeting):
        how = parallel, "bitwise", STEPS, Complex()
        return trained_on_device(rank, meeting, world_size, *how, clip_norm=None)

    plain = rig.build("ddp", "bitwise", Complex(), clip_norm=None)
    rig.train(plain, Alone(), "ddp", STEPS, work=Complex())
    assert all_good(run_ranks(world_size, body)) == [rig.sha256(plain)] * world_size


def test_a_clipped_step_has_one_hash_over_all_strategies_and_world_sizes():
    def body(rank, meeting, parallel, world_size):
        return trained_on_device(rank, meeting, world_size, parallel, "bitwise", STEPS, rig.Work())

    hashes = [
        all_good(run_ranks(w, functools.partial(body, parallel=parallel, world_size=w)))
        for parallel, w in (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp-grad-op", 3), ("fsdp", 4))
    ]
    assert len({found for of_ranks in hashes for found in of_ranks}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("parallel", STRATEGIES)
def test_fast_has_the_bits_of_as_many_ranks_on_the_cpu(parallel, world_size):
    def body(rank, meeting):
        how = parallel, "fast", STEPS, rig.Dense()
        return trained_on_device(rank, meeting, world_size, *how, clip_norm=None)

    expected = trained_on_cpu(world_size, parallel, "fast", STEPS)
    assert all_good(run_ranks(world_size, body)) == [expected] * world_size


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_hosts_that_are_far_ahead_change_no_bit(plain, parallel):
    def body(rank, meeting):
        how = parallel, "bitwise", STEPS, rig.Work()
        return trained_on_device(rank, meeting, 2, *how, clip_norm=None)

    with device.far_ahead():
        assert all_good(run_ranks(2, body)) == [plain] * 2


@pytest.mark.parametrize("parallel", STRATEGIES[1:])
def test_offloaded_state_has_the_bits_of_the_cpu(plain, parallel):
    def body(rank, meeting):
        how = parallel, "bitwise", STEPS, rig.Work()
        return trained_on_device(rank, meeting, 2, *how, clip_norm=None, offload=True)

    assert all_good(run_ranks(2, body)) == [plain] * 2


def test_no_operation_of_a_step_keeps_the_host_from_running_ahead():
    """What has no shapes before it has run would hide how far a GPU's host can be ahead."""

    def body(rank, meeting):
        trained_on_device(rank, meeting, 2, "fsdp", "bitwise", STEPS, rig.Work())
        torch.sim.synchronize()
        return device.counters(rank).unqueued

    assert run_ranks(2, body) == [{}, {}]
