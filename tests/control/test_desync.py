"""Ranks that reach different collectives: who is told to have gone another way."""

from dataclasses import replace

import pytest

from elastic.control.detection.desync import stalled, strays
from elastic.control.detection.hang import Watch, watch
from elastic.protocol.messages.pulse import Heartbeat

WAITING = Heartbeat(2, 4, 9, "reduce", 4.0, 1.0, True, "S")


def test_who_waits_in_another_collective_than_the_others_has_gone_astray():
    stuck = replace(WAITING, collective=(31, "all_to_all", 0))
    beats = [
        replace(stuck, worker=0, collective=(31, "all_reduce", 3), phase="vote"),
        replace(stuck, worker=1),
        stuck,
        replace(stuck, worker=3, generation=3, collective=(31, "all_gather", 1)),
        replace(stuck, worker=4, collective=(30, "all_gather", 7)),  # slow: it may still arrive
        replace(stuck, worker=5, phase_s=0.1),
    ]
    found = dict(strays([Watch(b, 10.0) for b in beats], 3.0))
    assert found == {
        0: "it waits in all_reduce of 3 for 4.0 s, in vote of step 10, where 3 of 5 wait in "
        "all_to_all: it has skipped a collective, or made one alone"
    }
    assert not dict(strays([Watch(b, 10.0) for b in beats], 4.5))


def test_of_two_that_wait_in_different_collectives_one_is_replaced():
    beats = [replace(WAITING, worker=w, collective=(5, "all_reduce", w)) for w in (7, 2)]
    assert [w for w, _ in strays([Watch(b, 10.0) for b in beats], 3.0)] == [7]


def test_nobody_is_named_before_a_majority_waits_together():
    """The others have only just come when the one astray has waited for long, or not all have."""
    stuck = replace(WAITING, collective=(31, "all_to_all", 0))
    astray = replace(stuck, worker=0, collective=(31, "all_reduce", 3))
    one, computing = stuck, replace(stuck, worker=1, waits_for_peers=False)
    assert not dict(strays([Watch(b, 10.0) for b in (astray, one, computing)], 3.0))
    late = replace(stuck, worker=1, phase_s=0.0)
    assert list(dict(strays([Watch(b, 10.0) for b in (astray, one, late)], 3.0))) == [0]


def test_who_waits_in_a_part_is_not_compared_with_those_in_the_whole():
    stuck = replace(WAITING, collective=(31, "all_to_all", 0))
    in_part = replace(stuck, worker=0, collective=(31, "all_gather", 5), part="replica0")
    beats = [in_part, replace(stuck, worker=1), stuck]
    assert not dict(strays([Watch(b, 10.0) for b in beats], 3.0))


# --- everybody waits -----------------------------------------------------------------
REDUCES = replace(
    WAITING, phase_s=61.0, p95_s=0.5, collective=(31, "all_reduce", 9), worker=0, part="shard1"
)


def waiting(*beats: Heartbeat, now: float = 100.0, stuck_s: float = 61.0) -> dict[int, str]:
    return dict(stalled([Watch(b, now, stuck_since=now - stuck_s) for b in beats], now, 3.0))


def test_a_generation_whose_members_all_wait_and_do_not_get_on_is_told_with_where_they_are():
    """A path between two of them is cut, or one has skipped a collective of a part."""
    others = [
        replace(REDUCES, worker=1, collective=(12, "all_gather", 9), part="replica0"),
        replace(REDUCES, worker=2, collective=(31, "all_reduce", 9), part=""),
        replace(REDUCES, worker=3, generation=3, phase="compute", waits_for_peers=False),
    ]
    assert waiting(REDUCES, *others) == {
        4: "all 3 members have waited for 61.0 s or more, in reduce of step 10, and none gets on: "
        "w0 in all_reduce 31 of shard1, w1 in all_gather 12 of replica0, w2 in all_reduce 31; a "
        "network path between two of them may be cut, or one has skipped a collective"
    }


PEER = replace(REDUCES, worker=1)


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (replace(PEER, phase_s=59.0), "it has just come"),
        (replace(PEER, phase="compute", waits_for_peers=False), "it is on its way"),
        (replace(PEER, p95_s=12.5), "its transfers have always been as slow"),
        (replace(PEER, p95_s=None), "how slow they are is not known"),
        (replace(PEER, is_new_there=True), "this one may be larger than the few before"),
        (replace(PEER, phase="form"), "forming has its own deadline"),
        (replace(PEER, collective=(0, "", 0)), "it waits in no collective"),
    ],
)
def test_who_may_still_get_on_raises_no_alarm(peer, why):
    assert waiting(REDUCES, peer) == {}, why


def test_a_transfer_of_many_collectives_raises_no_alarm_while_it_moves():
    """One phase, in which the number of the collective changes."""
    assert waiting(REDUCES, PEER, stuck_s=59.0) == {}
    seen = watch(None, REDUCES, 10.0)
    assert watch(seen, REDUCES, 70.0).stuck_since == 10.0
    assert watch(seen, replace(REDUCES, collective=(32, "all_reduce", 9)), 70.0).stuck_since == 70.0
    assert watch(seen, replace(REDUCES, waits_for_peers=False), 70.0).stuck_since is None


def test_a_lone_member_and_a_silent_one_are_others_business():
    assert waiting(REDUCES) == {}
    watches = [Watch(REDUCES, 100.0, stuck_since=10.0), Watch(PEER, 96.0, stuck_since=10.0)]
    assert not dict(stalled(watches, 100.0, 3.0))
