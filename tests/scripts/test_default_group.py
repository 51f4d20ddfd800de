"""torch's default group over a generation's: stock DDP, a lost peer, and an abandoned group."""

import os
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from elastic.protocol.errors import PeerLost
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.process_group import Alone
from workers.scripts.default_group import DefaultGroup, as_default


def train(steps: int) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        parallel(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return model


def total(model: nn.Module) -> float:
    return sum(p.detach().double().sum() for p in model.parameters()).item()  # pyright: ignore


def test_stock_ddp_trains_over_it():
    def body(ranks: Ranks):
        with as_default(DefaultGroup(ranks.form(1, [0, 1]))):
            seen = dist.get_world_size(), dist.get_rank(), dist.get_backend()
            sampler = DistributedSampler(range(10))  # pyright: ignore[reportArgumentType]
            gathered = [None, None]
            dist.all_gather_object(gathered, ranks.index)
            return seen, sampler.num_replicas, sampler.rank, gathered, total(train(4))

    first, second = run_ranks(2, body)
    assert first[:4] == ((2, 0, "gloo"), 2, 0, [0, 1])
    assert second[:4] == ((2, 1, "gloo"), 2, 1, [0, 1])
    assert first[4] == second[4]


def test_a_lone_rank_trains_over_it_too():
    with as_default(DefaultGroup(Alone("run/lone"))):
        assert dist.get_world_size() == 1
        train(2)
    assert not dist.is_initialized()


def test_a_lost_peer_ends_a_backward():
    def body(ranks: Ranks):
        group = DefaultGroup(ranks.form(1, [0, 1]))
        with as_default(group):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))  # no buffers to send
            model(torch.randn(3, 4)).sum().backward()
            ranks.meet([0, 1])
            if ranks.index == 1:
                ranks.tell(None)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                while True:
                    model(torch.randn(3, 4)).sum().backward()
            except RuntimeError:
                return isinstance(group.failure, PeerLost)

    assert run_ranks(2, body)[0] is True


def test_abandoning_it_ends_a_backward_that_waits_for_a_frozen_peer():
    def body(ranks: Ranks):
        inner = ranks.form(1, [0, 1])
        group = DefaultGroup(inner)
        with as_default(group):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
            if ranks.index == 1:
                ranks.hear("over")
                return None
            threading.Timer(0.3, inner.abandon).start()
            try:
                model(torch.randn(3, 4)).sum().backward()
            except RuntimeError:
                ranks.say("over")
                return isinstance(group.failure, PeerLost)

    assert run_ranks(2, body)[0] is True


def test_groups_of_some_ranks_are_the_script_s_own():
    def body(ranks: Ranks):
        with as_default(DefaultGroup(ranks.form(1, [0, 1, 2]))):
            pair, other = dist.new_group([0, 2]), dist.new_group([1])
            again = dist.new_group([2, 0])
            found: list[object] = []
            for group in (pair, other, again):
                if group is dist.GroupMember.NON_GROUP_MEMBER:
                    continue
                total = torch.tensor([float(ranks.index)])
                dist.all_reduce(total, group=group)
                gathered = [None] * dist.get_world_size(group)
                dist.all_gather_object(gathered, ranks.index, group=group)
                found.append((dist.get_rank(group), total.item(), gathered))
            if pair is not dist.GroupMember.NON_GROUP_MEMBER:
                model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), process_group=pair)
                model(torch.ones(1, 2)).sum().backward()
            mesh = dist.device_mesh.init_device_mesh(
                "cpu", (1, 3), mesh_dim_names=("outer", "inner")
            )
            return found, mesh["inner"].size()

    of_pair = (2.0, [0, 2])
    assert run_ranks(3, body) == [
        ([(0, *of_pair)] * 2, 3),
        ([(0, 1.0, [1])], 3),
        ([(1, *of_pair)] * 2, 3),
    ]


def test_a_lost_peer_ends_the_wait_in_a_group_of_some_ranks():
    def body(ranks: Ranks):
        group = DefaultGroup(ranks.form(1, [0, 1, 2]))
        with as_default(group):
            pair = dist.new_group([0, 1])
            if ranks.index == 1:
                ranks.tell(None)
                os.kill(os.getpid(), signal.SIGKILL)
            if ranks.index == 2:
                return True
            try:
                while True:
                    dist.all_reduce(torch.ones(1), group=pair)
            except PeerLost:
                return group.failure is not None

    found = run_ranks(3, body)
    assert (found[0], found[2]) == (True, True)
