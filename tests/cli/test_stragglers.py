"""A straggler is told once, by name and with numbers, and again after it had recovered."""

from elastic.controller.stragglers import Stragglers
from elastic.protocol.messages.pulse import Heartbeat, OwnPart


def beats(step: int, own_s: float, data_s: float = 0.0) -> list[Heartbeat]:
    return [
        Heartbeat(w, 3, step, "compute", 0.1, 0.1, False, "R", own=OwnPart(step, own, data))
        for w, own, data in ((4, 0.1, 0.0), (5, own_s, data_s))
    ]


def test_a_straggler_is_told_once_each_time():
    notes: list[dict] = []
    seen = Stragglers(None, notes.append, lambda worker, why: None)
    for step in range(1, 81):
        seen.look(beats(step, 0.1 if 40 < step < 50 else 0.5), step)
    why = (
        "w5 takes 5.0 times as long as its peers for its own part of a step (0.500 s against "
        "0.100 s per micro-batch)"
    )
    told = {"worker": "w5", "slow": "machine", "reason": why}
    assert notes == [{"step": step, **told} for step in (21, 70)]
    assert seen.reason == why
    assert seen.own_s == {"w4": 0.1, "w5": 0.5}


def test_a_straggler_is_replaced_where_the_policy_says_so():
    replaced: list[int] = []
    for factor in (None, 4.0, 6.0):
        seen = Stragglers(factor, lambda _: None, lambda worker, _: replaced.append(worker))
        for step in range(1, 60):
            seen.look(beats(step, 0.5), step)
    assert replaced == [5], "five times as slow is more than four times"


def test_who_waits_for_its_data_is_told_and_never_replaced():
    notes: list[dict] = []
    replaced: list[int] = []
    seen = Stragglers(3.0, notes.append, lambda worker, _: replaced.append(worker))
    for step in range(1, 60):
        seen.look(beats(step, 0.5, data_s=0.375), step)
    why = (
        "w5 waits for its data: 0.375 s of its 0.500 s per micro-batch, where its peers take "
        "0.100 s; it computes for 0.125 s, they for 0.100 s"
    )
    assert notes == [{"step": 21, "worker": "w5", "slow": "data", "reason": why}]
    assert (seen.reason, replaced) == (why, [])
