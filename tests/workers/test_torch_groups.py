"""A generation's group as torch's own code sees it: by name, through its mesh, and once dead."""

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic.protocol.errors import PeerLost
from tests.workers.ranks import Ranks, run_ranks
from tests.workers.sharded_rig import build, enter, train
from workers.distributed import device_mesh, gloo, process_group
from workers.distributed.device_mesh import Unconnected, default_group
from workers.distributed.process_group import Alone, Group, leave

CPU = torch.device("cpu")


def mesh_over(group: Group) -> Any:
    return device_mesh.shard_mesh(CPU, group)


def doubled(mesh: Any) -> Any:
    return DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False) * 2


def groups_behind_two_doubled() -> tuple[list[Any], list[Group]]:
    """Of two generations with equal ranks: what torch finds behind a result, and the groups."""
    groups: list[Group] = []
    found: list[Any] = []
    for _ in range(2):
        group = Unconnected(0, 2)
        result = doubled(mesh_over(group))
        groups.append(group)
        found.append(result.device_mesh.get_group())
    for group in groups:
        group.forget()
    return found, groups


def test_what_dtensor_remembers_of_a_generation_is_not_served_to_the_next():
    found, groups = groups_behind_two_doubled()
    assert [f is g for f, g in zip(found, groups, strict=True)] == [True, True]


def test_with_equal_axis_names_it_would_serve_the_dead_generation_s_group(monkeypatch):
    """Why each generation's axes have names of their own. torch has mended it once this fails."""
    monkeypatch.setattr(device_mesh, "axis_name", lambda axis, group: axis)
    found, (first, second) = groups_behind_two_doubled()
    assert found == [first, first]
    assert first is not second


def test_names_carry_the_generation_and_are_never_given_twice():
    names = []
    for _ in range(3):
        group = Alone("run/7")
        group.register([0])
        names.append(group.group_name)
        leave(group)
    assert len(set(names)) == 3
    assert all(name.startswith("run/7") for name in names)


def test_a_lone_rank_makes_torch_s_collectives_too():
    group = Alone("run/lone")
    group.register([0])
    mesh = mesh_over(group)
    tensor = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)], run_check=False)
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3]
    with default_group(group):
        gathered, scattered = torch.zeros(2), torch.zeros(2)
        dist.all_reduce(torch.ones(2), group=group)
        dist.all_gather_into_tensor(gathered, torch.ones(2), group=group)
        dist.reduce_scatter_tensor(scattered, torch.ones(2), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
        dist.barrier(group=group)
    assert (gathered.tolist(), scattered.tolist()) == ([1, 1], [1, 1])
    group.abandon()
    with pytest.raises(PeerLost):
        funcol.all_reduce(torch.ones(1), "sum", group)
    leave(group)


def calls(group: Group) -> dict[str, Callable[[], Any]]:
    """Each of torch's operations, with this rank's result."""
    rank, peer = group.rank(), 1 - group.rank()
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    out, pair = torch.zeros(2), [torch.zeros(2), torch.zeros(2)]

    def exchange() -> Any:
        received = torch.zeros(2)
        ops = [
            dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received

    def collective(name: str, *arguments: Any, result: Any = None, **named: Any) -> Any:
        getattr(dist, name)(*arguments, group=group, **named)
        return mine if result is None else result

    both = [torch.cat([t, t]) for t in [mine]]
    first = None if rank else [mine, mine * 10]
    return {
        "all_gather": lambda: collective("all_gather", pair, mine, result=pair),
        "all_gather_into_tensor": lambda: collective(
            "all_gather_into_tensor", (both4 := torch.zeros(4)), mine, result=both4
        ),
        "reduce_scatter": lambda: collective("reduce_scatter", out, [mine, mine * 2], result=out),
        "reduce_scatter_tensor": lambda: collective(
            "reduce_scatter_tensor", out, both[0], result=out
        ),
        "all_to_all": lambda: collective("all_to_all", pair, [mine, mine * 3], result=pair),
        "all_to_all_single": lambda: collective("all_to_all_single", out, mine, result=out),
        "scatter": lambda: collective("scatter", out, first, group_src=0, result=out),
        "gather": lambda: collective("gather", mine, None if rank else pair, group_dst=0),
        "exchange": exchange,
        "barrier": lambda: dist.barrier(group=group),
        "functional all_reduce": lambda: funcol.all_reduce(mine, "sum", group),
        "functional all_gather": lambda: funcol.all_gather_tensor(mine, 0, group),
        "functional reduce_scatter": lambda: funcol.reduce_scatter_tensor(both[0], "sum", 0, group),
        "functional all_to_all": lambda: funcol.all_to_all_single(mine, [1, 1], [1, 1], group),
        "redistribute": lambda: doubled(mesh_over(group)).redistribute(placements=[Replicate()]),
        "broadcast": lambda: collective("broadcast", mine, group_src=1),
        "reduce": lambda: collective("reduce", mine, group_dst=0),
        "all_reduce": lambda: collective("all_reduce", mine),
    }


def as_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [as_numbers(v) for v in value]
    if isinstance(value, DTensor):
        return value.to_local().tolist()
    return None if value is None else value.tolist()


def test_torch_s_operations_are_those_of_a_stock_group_and_all_raise_once_it_is_abandoned(tmp_path):
    def body(ranks: Ranks) -> Any:
        group = ranks.form(1, [0, 1])
        with default_group(group):
            ours = {name: as_numbers(call()) for name, call in calls(group).items()}
        where = f"file://{tmp_path}/stock"
        dist.init_process_group("gloo", init_method=where, rank=ranks.index, world_size=2)
        stock = {
            name: as_numbers(call())
            for name, call in calls(dist.group.WORLD).items()
            if name != "redistribute"
        }
        dist.barrier()
        group.abandon()
        raised = {}
        for name, call in calls(group).items():
            try:
                call()
            except Exception as error:
                raised[name] = type(error).__name__
        return ours, stock, raised

    for ours, stock, raised in run_ranks(2, body):
        assert {k: v for k, v in ours.items() if k != "redistribute"} == stock
        assert ours["redistribute"] == [2.0] * 4
        assert raised == dict.fromkeys(ours, "PeerLost")


@pytest.mark.usefixtures("place_slowly")
def test_sharded_parameters_and_their_optimizer_are_of_the_newest_generation_s_mesh():
    """Of the same members, whose shards stay. An optimizer with a hook keeps its DTensors."""

    def body(ranks: Ranks) -> Any:
        strategy = build("fsdp")
        train_state = strategy.train_state
        train_state.optimizer.register_step_pre_hook(lambda *_: None)
        for generation in (1, 2):
            group = ranks.form(generation, [0, 1])
            enter(strategy, group, generation - 1, generation=generation)
            train(strategy, group, "fsdp", 1)
            sharded = [p for p in train_state.model.parameters() if isinstance(p, DTensor)]
            groups = {(p * 1).device_mesh.get_group().group_name for p in sharded}
            sums = [float((p * 2).full_tensor().detach().double().sum()) for p in sharded]
            leave(group)
        return groups == {group.group_name}, sums

    plain = build("ddp")
    train(plain, Alone(), "ddp", 2)
    parameters = plain.train_state.model.parameters()
    expected = [2 * float(p.detach().double().sum()) for p in parameters if p.dim()]
    for is_newest, sums in run_ranks(2, body):
        assert is_newest
        assert sums == pytest.approx(expected, rel=1e-4, abs=1e-4)


def unawaited(name: str) -> None:
    torch.ops._c10d_functional.all_reduce(torch.ones(8), "sum", name)


def held() -> dict[str, int]:
    return {
        "threads": threading.active_count(),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "fds": len(os.listdir("/proc/self/fd")),
    }


def counts() -> dict[str, int]:
    """What the process holds without its garbage collector, and what torch knows after it."""
    own = held()
    gc.collect()
    world = distributed_c10d._world
    return {
        **own,
        "names": len(world.pg_names) + len(world.pg_map) + len(world.pg_group_ranks),
        "tags": len(world.tags_to_pg) + len(world.pg_to_tag) + len(world.pg_backend_config),
        "groups": sum(isinstance(o, Group) for o in gc.get_objects()),
    }


def free_left() -> None:
    """As the next generation's member does it, once nothing is under way in the groups before."""
    deadline = time.monotonic() + 60
    while not all(group.is_settled for group in process_group._left_behind):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling, bounded by the deadline
    leave(Alone())


@pytest.mark.parametrize("num_generations", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_left_of_many_generations(num_generations):
    """Of which each was abandoned with an operation that nobody waits for."""

    def body(ranks: Ranks) -> Any:
        gc.disable()
        early: dict[str, int] = {}
        for generation in range(1, num_generations + 1):
            group = ranks.form(generation, [0, 1])
            part = group.part("shard0", [1, 0], 60.0)
            assert doubled(mesh_over(group)).full_tensor().tolist() == [2.0] * 4
            if ranks.index == 0:
                dist.send_object_list(["x"], group=part, group_dst=0, device=CPU)
            else:
                dist.recv_object_list([None], group=part, group_src=1, device=CPU)
            unawaited(group.group_name)
            group.all_reduce(torch.ones(1)).wait()
            leave(group)
            if generation == num_generations // 4:
                free_left()
                early = counts()
        free_left()
        return early, counts()

    for early, late in run_ranks(2, body):
        grown = {name: late[name] - early[name] for name in early}
        assert all(n <= 2 for n in grown.values()), (early, late)
        assert late["groups"] <= 4, late


def test_a_forked_process_collects_no_group_of_its_parent():
    """Its end joins threads which that process has not, and so never comes."""
    with suppress(AttributeError):  # a group forms: there is nowhere to
        gloo.connect("127.0.0.1", cast(Any, None))
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    cycle = [group]
    cycle.append(cycle)
    gc.disable()
    try:
        del group, cycle
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    with process_of(child) as pidfd:
        ending = select.poll()  # `select` takes no more than 1,024 files
        ending.register(pidfd, select.POLLIN)
        if not ending.poll(60_000):
            os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == 0


@contextmanager
def process_of(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
