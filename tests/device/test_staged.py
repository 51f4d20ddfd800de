"""The staged group: a device's tensors through pinned memory and gloo, with the bits of the CPU."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from elastic.protocol.errors import PeerLost
from tests.device import device
from tests.device.ranks import all_good, run_ranks
from tests.device.test_waiting import Held, finish
from tests.device.training import trained_on_device
from tests.workers import sharded_rig as rig
from workers.distributed.process_group import Alone
from workers.parallel.pipeline.links import Links

run_ranks = partial(run_ranks, is_staged=True)
STEPS = 2


@pytest.fixture(scope="module")
def plain():
    """The hash of one rank on the CPU (test_training.py tells why nothing is clipped)."""
    strategy = rig.build("ddp", clip_norm=None)
    rig.train(strategy, Alone(), "ddp", STEPS)
    return rig.sha256(strategy)


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [("ddp", 2), ("ddp", 3), ("fsdp", 3), ("fsdp-grad-op", 2), ("hsdp:2", 4)],
)
def test_training_has_the_bits_of_one_rank_on_the_cpu(plain, parallel, world_size):
    def body(rank, meeting):
        how = parallel, "bitwise", STEPS, rig.Work()
        found = trained_on_device(rank, meeting, world_size, *how, clip_norm=None)
        return found, device.counters(rank).pageable_d2h_bytes

    hashes, pageable = zip(*all_good(run_ranks(world_size, body)), strict=True)
    assert set(hashes) == {plain}
    final = sum(t.nbytes for t in rig.Net().state_dict().values())
    assert max(pageable) <= final, "all but the final hash leaves by pinned memory"


def test_every_operation_is_gloos():
    def body(rank, meeting):
        group, here = meeting.group(rank, 2), torch.device("sim", rank)
        mine = torch.arange(4.0, device=here) + 10 * rank
        sums, first, root = mine.clone(), mine.clone(), mine.clone()
        whole, halves = torch.empty(8, device=here), torch.empty(4, device=here)
        one, two = torch.empty(4, device=here), torch.empty(4, device=here)
        lists = [torch.empty(2, device=here), torch.empty(2, device=here)]
        got, part, flat = (torch.empty(n, device=here) for n in (4, 2, 2))
        peer = 1 - rank
        group.all_reduce(sums).wait()
        group.broadcast([first]).wait()
        options = dist.ReduceOptions()
        options.rootRank = 1
        group.reduce([root], options).wait()
        group.all_gather_flat(whole, mine).wait()
        group.all_to_all_flat(halves, mine).wait()
        group.all_gather([one, two], mine).wait()
        group.all_to_all(lists, list(mine.chunk(2))).wait()
        group.reduce_scatter([part], [list(mine.chunk(2))]).wait()
        group.reduce_scatter_single(flat, mine).wait()
        works = [group.send([mine], peer, 3), group.recv([got], peer, 3)]
        for work in works:
            work.wait()
        group.barrier().wait()
        found = [sums, first, root, whole, halves, one, two, *lists, part, flat, got]
        return [group.read(t).tolist() for t in found]

    zero, ten = [0.0, 1, 2, 3], [10.0, 11, 12, 13]
    both = [10.0, 12, 14, 16]
    assert all_good(run_ranks(2, body)) == [
        [both, zero, zero, zero + ten, [0, 1, 10, 11], zero, ten, [0, 1], [10, 11], [10, 12],
         [10, 12], ten],
        [both, zero, both, zero + ten, [2, 3, 12, 13], zero, ten, [2, 3], [12, 13], [14, 16],
         [14, 16], zero],
    ]  # fmt: skip


def test_what_is_overwritten_behind_a_launch_was_sent_before():
    def body(rank, meeting):
        group, mine = meeting.group(rank, 2), torch.full((1 << 16,), 1.0 + rank).to(f"sim:{rank}")
        received = torch.empty(2 << 16, device=mine.device)
        pending = group.all_gather_flat(received, mine)
        mine.zero_()
        with torch.Stream(mine.device) as other:
            pending.wait()
            sums = received.view(2, -1).sum(1)
        torch.accelerator.current_stream(mine.device).wait_stream(other)
        return group.read(sums).tolist()

    assert all_good(run_ranks(2, body)) == [[1 << 16, 2 << 16]] * 2


def test_ranks_may_share_a_device():
    def body(rank, meeting):
        here = torch.device("sim", 0)
        torch.sim.set_device(here)
        group = meeting.form(rank, 3, 1, here).wait(60)
        value = torch.tensor([float(rank)], device=here)
        for _ in range(3):
            group.all_reduce(value).wait()
        return group.read(value).tolist()

    assert all_good(run_ranks(3, body)) == [[27.0]] * 3


def test_a_wait_for_a_peer_that_never_comes_ends_with_the_generation():
    def body(rank, meeting):
        group = meeting.group(rank, 2)
        if rank == 1:
            return None
        value = torch.ones(3, device="sim:0")
        threading.Timer(0.1, group.abandon).start()
        began = time.monotonic()
        with pytest.raises(PeerLost, match="given up"):
            group.all_reduce(value).wait()
        with pytest.raises(PeerLost, match="given up"):
            group.all_reduce(value)
        return time.monotonic() - began, value.tolist()

    waited_s, value = run_ranks(2, body)[0]
    assert waited_s < 30
    assert value == [1, 1, 1], "no result is half of one"


def test_a_generation_that_is_given_up_leaves_no_thread_behind():
    def body(rank, meeting):
        group = meeting.group(rank, 2)
        group.all_reduce(torch.ones(1, device=f"sim:{rank}")).wait()
        group.abandon()

    before = set(threading.enumerate())
    all_good(run_ranks(2, body))
    for thread in set(threading.enumerate()) - before:
        if thread.name == "staged":
            thread.join(30)
            assert not thread.is_alive()


def test_a_kernel_that_never_ends_is_its_own_ranks_and_the_others_wait():
    held = Held([("gather", True), ("compute", False), ("gather", True)])

    def on_group(group):
        vitals = held.vitals[group.rank()]
        group.on_wait, group.waiting_for = vitals.waits_in, vitals.waiting_for
        held.on_group(group)

    told = {"in_passes": True, "on_group": on_group}
    all_good(run_ranks(3, lambda r, m: finish(r, m, vitals=held.vitals[r], **told).gradients))
    held.check()


def test_what_a_stage_sends_comes_by_the_group_of_the_device():
    """Tags tell messages apart in it; the group that decides has no way to a device's memory."""

    def body(rank, meeting):
        group, here = meeting.group(rank, 2), torch.device("sim", rank)
        links, numbers = Links(group), torch.tensor([rank])
        if rank == 0:
            links.post(torch.arange(3.0, device=here), 1, "activation", 4)
            links.post(torch.arange(3.0, device=here) + 1, 1, "gradient", 5)
            links.post(numbers, 1, "batch", 6)
            for work in links.posted():
                work.wait()
            return []
        gradient, activation = (torch.empty(3, device=here) for _ in range(2))
        for tensor, kind, tag in ((numbers, "batch", 6), (gradient, "gradient", 5)):
            links.receive(tensor, 0, kind, tag).wait()
        links.receive(activation, 0, "activation", 4).wait()
        return [*group.read(activation).tolist(), *group.read(gradient).tolist(), int(numbers)]

    assert all_good(run_ranks(2, body)) == [[], [0.0, 1.0, 2.0, 1.0, 2.0, 3.0, 0]]
