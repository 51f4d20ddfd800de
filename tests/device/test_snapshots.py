"""Snapshots of state on a device, taken by another thread as savers and backups take them."""

import socket
import threading
import time

import pytest
import torch

from elastic.protocol.messages.peer import Update
from elastic.protocol.step_record import KnownSteps
from tests.device import device
from tests.device.ranks import all_good, run_ranks
from tests.device.training import build, enter, train
from tests.workers import sharded_rig as rig
from workers.distributed.process_group import Alone
from workers.membership.state_stream import Follower, receive_tensors
from workers.train_state.snapshot import Arena, HostMemory

UPDATE = Update(
    1, is_finite=True, divisor=1.0, num_microbatches=1, log_names=(), records=KnownSteps((), None)
)


@pytest.fixture
def strategy():
    strategy = build(0, "ddp", "bitwise", rig.Dense())
    train(strategy, Alone(), "ddp", 1, work=rig.Dense())
    return strategy


def take_in_a_thread(snapshot):
    thread = threading.Thread(target=lambda: [snapshot.take(name) for name in snapshot.shapes])
    thread.start()
    thread.join(60)
    return device.counters()


def test_a_snapshot_leaves_by_pinned_memory(strategy):
    device.reset_counters()
    assert take_in_a_thread(strategy.train_state.snapshot()).pageable_d2h_bytes == 0


def test_a_snapshot_does_not_wait_for_each_tensor(strategy):
    device.reset_counters()
    assert take_in_a_thread(strategy.train_state.snapshot()).host_syncs <= 2


def test_a_snapshot_is_in_order_where_the_loop_has_a_stream_of_its_own(strategy):
    side = torch.Stream(torch.device("sim", 0))
    side.wait_stream(torch.accelerator.current_stream(torch.device("sim", 0)))
    with side:
        train(strategy, Alone(), "ddp", 1, work=rig.Dense())
        snapshot = strategy.train_state.snapshot()
    take_in_a_thread(snapshot)
    assert device.races() == []


def test_a_step_goes_on_while_its_snapshot_leaves_and_changes_nothing_of_it(strategy):
    """Nobody waits for the reader: what has not been taken leaves before the step changes it."""
    before = {name: t.cpu().clone() for name, t in strategy.train_state.tensors().items()}
    snapshot = strategy.train_state.snapshot()
    device.reset_counters()
    train(strategy, Alone(), "ddp", 1, work=rig.Dense())
    assert device.counters().host_syncs == 0
    taken = snapshot.taken()
    assert all(torch.equal(taken[name], tensor) for name, tensor in before.items())
    assert device.counters().pageable_d2h_bytes == 0


def test_a_copy_that_is_on_its_way_keeps_the_memory_that_it_is_made_of():
    """A buffer is a clone in the snapshot, and nobody else has it."""
    name, strategy = "model/norm.running_mean", build(0, "ddp", "bitwise", rig.Work())
    snapshot = strategy.train_state.snapshot()
    device.stick("copy_ to the host")
    thread = threading.Thread(target=snapshot.take, args=(name,))
    thread.start()
    while name in snapshot._left:
        time.sleep(0.001)  # polling; bounded by the test's own limit
    with snapshot._lock:
        _, shape = snapshot.shapes[name]
    others = [torch.zeros(shape, device="sim:0") for _ in range(4)]
    assert device.races() == []
    device.release()
    thread.join(60)
    assert len(others) == 4


def test_memory_that_a_device_writes_to_is_used_as_it_is(strategy):
    arena, shapes = Arena(is_pinned=True), strategy.train_state.snapshot().shapes
    arena.reserve(shapes.values())
    first = strategy.train_state.snapshot(memory=arena).taken()
    assert all(tensor.is_pinned() for tensor in first.values())


def test_updates_for_a_newcomer_leave_likewise(strategy):
    ours, theirs = socket.socketpair()
    follower = Follower(ours, 1)
    gradients = {"g0": torch.ones(3, 4, device="sim:0"), "g1": torch.zeros(0, device="sim:0")}
    device.reset_counters()
    follower.offer(UPDATE, gradients)
    gradients["g0"].zero_()  # the next step
    counters = device.counters()
    assert (counters.host_syncs, counters.pageable_d2h_bytes) == (0, 0)
    _, tensors = receive_tensors(theirs, HostMemory(), lambda: None)
    assert tensors["g0"].tolist() == [[1.0] * 4] * 3
    follower.close()
    theirs.close()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "fsdp-grad-op"])
@pytest.mark.parametrize("reduction", ["fast", "bitwise"])
def test_a_steady_step_reads_of_its_device_once_and_by_pinned_memory(parallel, reduction):
    def body(rank, meeting):
        how = {"reduction": reduction, "work": rig.Dense()}
        strategy = build(rank, parallel, reduction, rig.Dense())
        group, reads = meeting.group(rank, 2), []
        enter(strategy, group, 0)
        train(strategy, group, parallel, 1, **how)
        read = group.read
        group.read = lambda result: (reads.append(result), read(result))[1]
        device.reset_counters(rank)
        train(strategy, group, parallel, 1, **how)
        counters = device.counters(rank)
        return len(reads), counters.host_syncs, counters.pageable_d2h_bytes

    assert all_good(run_ranks(2, body)) == [(1, 0, 0)] * 2
