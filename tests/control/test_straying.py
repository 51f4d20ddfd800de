"""Ranks that reach different collectives: who is told to have gone another way."""

from dataclasses import replace

from elastic.control.straying import strays
from elastic.control.suspicion import Heartbeat, Watch

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
