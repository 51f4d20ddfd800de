"""What a rank shows while its host, which is far ahead, waits for its device: whose work it is."""

import functools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from tests.device import device
from tests.device.ranks import DEADLINE_S, all_good, run_ranks
from workers.health.device_time import device_time_of
from workers.health.vitals import Vitals
from workers.reduction.reducers import Reduced
from workers.session import Step

STUCK_S = 0.6


class Sums:
    """Ends a step with one all-reduce. in_passes: the passes exchange something as well."""

    def __init__(self, group, where, *, in_passes):
        self._group, self._value = group, torch.ones(4).to(where)
        if in_passes:
            gathered = torch.empty(4 * group.size(), device=where)
            self._value.mul_(2)
            group.all_gather_flat(gathered, self._value).wait()
            self._value.add_(gathered[:4])
        self._value.mul_(2)

    def finish(self):
        self._group.all_reduce(self._value).wait()
        return Reduced({"parameter": self._value}, {})


def finish(rank, meeting, *, in_passes=False, vitals=None, on_group=lambda group: None):
    """A step's passes are launched, then its end is waited for."""
    group, where = meeting.group(rank, 3), torch.device("sim", rank)
    on_group(group)
    step = SimpleNamespace(
        _member=SimpleNamespace(device=where, group=group, load=1.0), _vitals=vitals, _ids=range(1)
    )
    step._end_passes = functools.partial(Step._end_passes, step)
    group.waiting_for = vitals.waiting_for
    vitals.begin_step(device_time_of(where))
    vitals.enter("compute")
    return Step._finish(step, Sums(group, where, in_passes=in_passes))


class Held:
    """Device 1 is stuck in a kernel until all ranks have shown for `STUCK_S` that they wait for
    it. A busy machine may take any time before and after."""

    def __init__(self, expected):
        """expected: phases of the ranks, and whether they tell in which collective they gather."""
        self.vitals = [Vitals() for _ in expected]
        self._expected, self._all_there = expected, threading.Barrier(len(expected) + 1)
        self.seen, self.held_s, self._began = [], 0.0, 0.0
        self._looks = threading.Thread(target=self._look)
        device.stick("mul", device=1)

    def on_group(self, group):
        if group.rank() == 1:
            self._began = time.monotonic()
            self._looks.start()
        self._all_there.wait(60)

    def _look(self):
        self._all_there.wait(60)
        give_up_at = time.monotonic() + 30
        while self._see() != self._expected and time.monotonic() < give_up_at:
            time.sleep(0.01)
        shown_at = time.monotonic()
        time.sleep(STUCK_S)
        self.seen, self.held_s = self._see(), time.monotonic() - shown_at
        device.release()

    def _see(self):
        return [(v.phase, v.phase == "gather" and v._collective[1] > 0) for v in self.vitals]

    def check(self):
        """Once the ranks are done."""
        took_s = time.monotonic() - self._began
        self._looks.join()
        assert self.seen == self._expected
        own = [v.own.seconds for v in self.vitals]
        assert self.held_s <= own[1] <= took_s
        assert max(own[0], own[2]) <= took_s - self.held_s


@pytest.mark.parametrize(("in_passes", "waiting"), [(False, "reduce"), (True, "gather")])
def test_a_kernel_that_never_ends_is_its_own_ranks_and_the_others_wait(in_passes, waiting):
    held = Held([(waiting, in_passes), ("compute", False), (waiting, in_passes)])
    told = {"in_passes": in_passes, "on_group": held.on_group}
    all_good(run_ranks(3, lambda r, m: finish(r, m, vitals=held.vitals[r], **told).gradients))
    held.check()


def test_nccls_own_notice_of_a_lost_peer_ends_the_wait():
    groups = []

    def on_group(group):
        groups.append(group)
        if group.rank() == 0:
            torch.sim.synchronize()  # what has connected it
            device.stick("nccl:", device=0)
        if group.rank() == 1:
            raise RuntimeError("gone")
        threading.Timer(0.1, group.backend.lose_peer, (1,)).start()

    began = time.monotonic()
    found = run_ranks(3, lambda r, m: finish(r, m, vitals=Vitals(), on_group=on_group))
    assert [type(f) for f in found] == [PeerLost, RuntimeError, PeerLost]
    assert "ncclRemoteError" in str(found[0])
    assert time.monotonic() - began < 30
    for group in groups:
        group.abandon()
    device.release()


@pytest.mark.parametrize("is_of_part", [False, True])
def test_nccls_own_notice_of_a_lost_peer_ends_the_read_of_a_result(is_of_part):
    all_there, groups = threading.Barrier(3), []

    def body(rank, meeting):
        group = meeting.group(rank, 3)
        part = group.part("part", range(3), DEADLINE_S, is_apart=True) if is_of_part else group
        groups.append(group)
        value = torch.ones(4).to(torch.device("sim", rank))
        all_there.wait(60)
        if rank == 1:
            raise RuntimeError("gone")
        group.all_reduce(value).wait()
        part.all_reduce(value).wait()
        threading.Timer(0.1, part.backend.lose_peer, (1,)).start()
        return group.read(value)

    found = run_ranks(3, body)
    assert [type(f) for f in found] == [PeerLost, RuntimeError, PeerLost]
    assert "ncclRemoteError" in str(found[0])
    for group in groups:
        group.abandon()


def test_no_wait_outlives_a_group_that_is_given_up():
    all_there = threading.Barrier(3)
    device.stick("mul", device=0)

    def on_group(group):
        all_there.wait(60)
        threading.Timer(0.1, group.abandon).start()

    found = run_ranks(3, lambda r, m: finish(r, m, vitals=Vitals(), on_group=on_group))
    assert [type(f) for f in found] == [PeerLost] * 3
    device.release()
