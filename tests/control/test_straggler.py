"""Who counts as a straggler: for long, by far, and by its own part of the step only."""

from elastic.control.detection.straggler import LONG_STEPS, Pace, median_without, paces, stragglers
from elastic.protocol.messages.pulse import Heartbeat


def beat(worker: int, own_s: float, own_steps: int = 9, generation: int = 2) -> Heartbeat:
    return Heartbeat(
        worker, generation, 9, "compute", 0.1, 0.1, False, "R", own_steps=own_steps, own_s=own_s
    )


def test_each_is_compared_with_the_median_of_the_others():
    beats = [beat(0, 0.1), beat(1, 0.1), beat(2, 0.5), beat(3, 0.2), beat(4, 9.0, generation=1)]
    assert paces(beats) == (
        Pace(0, 0.1, 0.2),
        Pace(1, 0.1, 0.2),
        Pace(2, 0.5, 0.1),
        Pace(3, 0.2, 0.1),
    )
    assert paces(beats[:1]) == ()
    assert paces([beat(0, 0.1), beat(1, 0.0, own_steps=0)]) == (), "it has not made a step yet"
    assert median_without([1.0, 2.0, 4.0], 0) == 3.0
    assert median_without([1.0, 2.0, 4.0, 8.0], 2) == 2.0


def test_a_rank_is_a_straggler_after_many_slow_steps_in_a_row():
    since: dict[int, int] = {}
    found: list[tuple[int, tuple[int, ...]]] = []
    for step in range(1, LONG_STEPS + 7):
        own_s = 0.1 if step == 5 else 0.5  # one good step: it begins anew
        beats = [beat(0, 0.1, step), beat(1, own_s, step)]
        since, long = stragglers(since, beats, factor=3.0)
        if long:
            found.append((step, tuple(p.worker for p in long)))
    assert found == [(LONG_STEPS + 6, (1,))]


def test_a_large_factor_of_almost_nothing_is_no_straggler():
    beats = [beat(0, 0.0001), beat(1, 0.002)]
    assert stragglers({1: -LONG_STEPS}, beats, factor=3.0) == ({}, ())
