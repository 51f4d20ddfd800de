"""The manners of NCCL that the group of simulated devices has."""

import threading
import time
from functools import partial

import pytest
import torch
from torch.distributed import DistBackendError

from elastic.protocol.errors import PeerLost
from tests.device import device, nccl_group
from tests.device.ranks import Meeting, all_good, run_ranks
from workers.distributed.process_group import Formation, GroupSpec


def connected(rank, meeting, world_size=2):
    nccl = meeting.nccl(rank, world_size)
    nccl.eager_connect_single_device(torch.device("sim", rank))
    return nccl


def on(rank, *values):
    return torch.tensor(values).to(torch.device("sim", rank))


def test_collectives_give_what_nccl_gives():
    def body(rank, meeting):
        nccl, found = connected(rank, meeting, 3), {}
        total = on(rank, 1.0, 2.0 * rank)
        nccl.allreduce([total]).wait()
        found["sum"] = total.tolist()
        rows = [on(rank, 0.0) for _ in range(3)]
        nccl.allgather([rows], [on(rank, float(rank))]).wait()
        found["rows"] = [row.item() for row in rows]
        flat = on(rank, 0, 0, 0)
        nccl._allgather_base(flat, on(rank, rank)).wait()
        found["flat"] = flat.tolist()
        sent = torch.arange(9.0).to(total.device) + 10 * rank
        cut = [1, 3, 5]
        received = torch.empty(3 * cut[rank], device=total.device)
        nccl.alltoall_base(received, sent, [cut[rank]] * 3, cut).wait()
        found["all_to_all"] = received.tolist()
        part = on(rank, 0.0)
        nccl._reduce_scatter_base(part, on(rank, 1.0, 2.0, 3.0)).wait()
        found["scattered"] = part.item()
        told = on(rank, 5.0 if rank == 0 else 0.0)
        nccl.broadcast([told]).wait()
        found["told"] = told.item()
        return found

    for rank, found in enumerate(all_good(run_ranks(3, body))):
        cut, start = [1, 3, 5][rank], [0, 1, 4][rank]
        assert found == {
            "sum": [3.0, 6.0],
            "rows": [0.0, 1.0, 2.0],
            "flat": [0, 1, 2],
            "all_to_all": [10.0 * r + start + i for r in range(3) for i in range(cut)],
            "scattered": 3.0 * (rank + 1),
            "told": 5.0,
        }


def test_a_wait_orders_the_stream_and_the_host_goes_on():
    hosts = threading.Barrier(2)

    def body(rank, meeting):
        nccl = connected(rank, meeting)
        if rank == 1:
            device.stick("nccl:", device=1)
        value = on(rank, 1.0)
        work = nccl.allreduce([value])
        work.wait()
        twice = value * 2
        was_done = work.is_completed() and rank == 1
        if hosts.wait(60) == 0:  # both have gone on
            device.release()
        return was_done, twice.item()

    assert all_good(run_ranks(2, body)) == [(False, 4)] * 2


def test_a_result_that_is_read_without_a_wait_is_a_race():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        value = on(rank, 1.0)
        work = nccl.allreduce([value])
        other = value + 1
        work.wait()
        torch.sim.synchronize()
        return other.device

    all_good(run_ranks(2, body))
    found = device.races()
    assert len(found) == 2
    assert all("nccl:all_reduce wrote" in race for race in found)


def test_an_abort_leaves_garbage_and_no_error():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        if rank == 1:
            return None  # it is gone
        value = on(rank, 1.0)
        work = nccl.allreduce([value])
        work.wait()
        nccl.abort()
        (read,) = value.view(torch.int32).tolist()
        with pytest.raises(DistBackendError, match="aborted"):
            nccl.allreduce([value])
        return read & 0xFFFFFFFF

    assert run_ranks(2, body)[0] == 0xA5A5A5A5


def test_a_host_that_is_stuck_in_a_read_is_woken_by_the_abort():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        if rank == 1:
            return None
        value = on(rank, 1.0)
        nccl.allreduce([value]).wait()
        with device.before_host_waits(lambda index, reason: nccl.abort()):
            return value.item()

    assert abs(run_ranks(2, body)[0]) < 1e-10


def test_a_lost_peer_is_noticed_asynchronously_and_ends_nothing():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        if rank == 1:
            return
        value = on(rank, 1.0)
        work = nccl.allreduce([value])
        assert not work.is_completed()
        nccl.lose_peer(1)
        assert work.is_completed()
        with pytest.raises(DistBackendError, match="ncclRemoteError"):
            work.wait()
        nccl.abort()

    assert run_ranks(2, body) == [None, None]


def test_tensors_of_the_host_and_gaps_are_refused():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        with pytest.raises(ValueError, match="must be CUDA and dense"):
            nccl.allreduce([torch.ones(2)])
        with pytest.raises(ValueError, match="must be contiguous"):
            nccl.allreduce([torch.ones(2, 2, device=torch.device("sim", rank)).t()[:1]])
        with pytest.raises(TypeError, match="Unconvertible NCCL type"):
            nccl.allreduce([torch.ones(2, device=torch.device("sim", rank), dtype=torch.cfloat)])

    all_good(run_ranks(2, body))


def test_forming_waits_for_an_absent_peer_until_it_is_aborted():
    nccl = Meeting().nccl(0, 2)
    nccl.begin_connect(torch.device("sim", 0))
    nccl.abort()
    nccl.connecting.join(30)
    assert not nccl.connecting.is_alive()


def test_a_launch_waits_for_an_absent_peer_and_an_abort_for_the_launch():
    nccl = Meeting().nccl(0, 2)
    nccl.connect_s = 0.5
    nccl.begin_connect(torch.device("sim", 0))
    launching = threading.Thread(target=partial(refused, nccl), daemon=True)
    launching.start()
    began = time.monotonic()
    while not nccl._lock.locked():
        assert time.monotonic() - began < 30
    nccl.abort()
    launching.join(30)
    assert not launching.is_alive()
    assert time.monotonic() - began > 0.4


def refused(nccl):
    with pytest.raises(DistBackendError, match="NCCL timeout"):
        nccl.allreduce([on(0, 1.0)])


def test_forming_with_an_absent_peer_is_given_up_at_once_and_its_thread_ends_with_nccl_s_limit(
    monkeypatch,
):
    monkeypatch.setattr(nccl_group, "CONNECT_S", 3.0)
    meeting, where = Meeting(), torch.device("sim", 0)

    def form(given_up):
        return meeting.data(where, 1, GroupSpec(None, "", 0, 2, 60.0, 60.0, given_up))

    before = set(threading.enumerate())
    formation = Formation(form)
    threading.Timer(0.1, formation.abandon).start()
    with pytest.raises(PeerLost, match="given up while it formed"):
        formation.wait(60.0)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    assert "nccl-connect" in left, "nobody has waited for it"


def test_a_group_and_its_parts_are_aborted_together_and_whoever_gives_up_does_not_wait():
    """An abort of one may wait for kernels of the other."""

    def body(rank, meeting):
        group = meeting.group(rank, 3)
        part = group.part("shard", [0, 1], 60.0) if rank < 2 else None
        aborts = threading.Barrier(2)
        for held in (group, part):
            if held is not None and rank == 0:
                held.backend.abort = partial(meet_and_abort, aborts, held.backend.abort)
        began = time.monotonic()
        group.abandon()
        took_s = time.monotonic() - began
        while not group.is_settled:
            assert time.monotonic() - began < 30
        return took_s < 15  # the other abort would have come too late for `aborts`

    assert run_ranks(3, body) == [True] * 3


def meet_and_abort(aborts, abort):
    aborts.wait(30)
    abort()


def test_results_that_are_held_come_when_they_are_let_go():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        nccl.hold(True)
        value = on(rank, 1.0)
        work = nccl.allreduce([value])
        held = work.is_completed()
        nccl.hold(False)
        work.wait()
        return held, value.item()

    assert run_ranks(2, body) == [(False, 2.0)] * 2


def test_ranks_that_launch_different_collectives_are_told_of():
    def body(rank, meeting):
        nccl = connected(rank, meeting)
        value = on(rank, 1.0)
        if rank == 0:
            nccl.allreduce([value])
        else:
            nccl._allgather_base(on(rank, 0.0, 0.0), value)
        deadline = time.monotonic() + 10
        found = []
        while not found and time.monotonic() < deadline:
            found = device.desyncs()
        nccl.abort()
        return found

    found = [text for texts in run_ranks(2, body) for text in texts]
    assert found
    assert "all_reduce of 4 bytes" in found[0]
    assert "all_gather of 4 bytes" in found[0]
    device.desyncs()
