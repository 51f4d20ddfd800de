"""A straggler is told once, by name and with numbers, and again after it had recovered."""

from elastic.controller.stragglers import Stragglers
from elastic.protocol.messages.pulse import Heartbeat


def beats(step: int, own_s: float) -> list[Heartbeat]:
    return [
        Heartbeat(w, 3, step, "compute", 0.1, 0.1, False, "R", own_steps=step, own_s=s)
        for w, s in ((4, 0.1), (5, own_s))
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
    assert notes == [{"step": step, "worker": "w5", "reason": why} for step in (21, 70)]
    assert seen.reason == why
    assert seen.own_s == {"w4": 0.1, "w5": 0.5}


def test_a_straggler_is_replaced_where_the_policy_says_so():
    replaced: list[int] = []
    for factor in (None, 4.0, 6.0):
        seen = Stragglers(factor, lambda _: None, lambda worker, _: replaced.append(worker))
        for step in range(1, 60):
            seen.look(beats(step, 0.5), step)
    assert replaced == [5], "five times as slow is more than four times"
