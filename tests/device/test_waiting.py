"""What a rank shows while its host, which is far ahead, waits for its device: whose work it is."""

import functools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from tests.device import device
from tests.device.ranks import all_good, run_ranks
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
    vitals.enter("compute")
    vitals.begin_step()
    return Step._finish(step, Sums(group, where, in_passes=in_passes))


@pytest.mark.parametrize(("in_passes", "waiting"), [(False, "reduce"), (True, "gather")])
def test_a_kernel_that_never_ends_is_its_own_ranks_and_the_others_wait(in_passes, waiting):
    vitals, seen = [Vitals() for _ in range(3)], []
    device.stick("mul", device=1)

    def look():
        seen.extend((v.phase, v._collective[1] > 0) for v in vitals)
        device.release()

    threading.Timer(STUCK_S, look).start()
    all_good(
        run_ranks(3, lambda r, m: finish(r, m, in_passes=in_passes, vitals=vitals[r]).gradients)
    )
    assert [phase for phase, _ in seen] == [waiting, "compute", waiting]
    if in_passes:
        assert seen[0][1], "the collective is told"
    own = [v.own.seconds for v in vitals]
    assert STUCK_S / 2 < own[1] < 1.5 * STUCK_S
    assert max(own[0], own[2]) < STUCK_S / 2


def test_nccls_own_notice_of_a_lost_peer_ends_the_wait():
    groups = []
    device.stick("nccl:", device=0)

    def on_group(group):
        groups.append(group)
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


def test_no_wait_outlives_a_group_that_is_given_up():
    all_there = threading.Barrier(3)
    device.stick("mul", device=0)

    def on_group(group):
        all_there.wait(60)
        threading.Timer(0.1, group.abandon).start()

    found = run_ranks(3, lambda r, m: finish(r, m, vitals=Vitals(), on_group=on_group))
    assert [type(f) for f in found] == [PeerLost] * 3
    device.release()
