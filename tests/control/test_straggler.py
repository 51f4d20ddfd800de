"""Who counts as a straggler: for long, by far, and by its own part of the step only."""

from elastic.control.detection.straggler import (
    LONG_STEPS,
    Lateness,
    Pace,
    Since,
    Slowness,
    median_without,
    paces,
    stragglers,
)
from elastic.protocol.messages.pulse import Heartbeat, OwnPart


def beat(
    worker: int, own_s: float, own_steps: int = 9, generation: int = 2, data_s: float = 0.0
) -> Heartbeat:
    own = OwnPart(own_steps, own_s, data_s)
    return Heartbeat(worker, generation, 9, "compute", 0.1, 0.1, False, "R", own=own)


def test_each_is_compared_with_the_median_of_the_others():
    beats = [beat(0, 0.1), beat(1, 0.1), beat(2, 0.5), beat(3, 0.2), beat(4, 9.0, generation=1)]
    found = [(p.worker, p.own) for p in paces(reversed(beats))]
    assert found == [
        (0, Lateness(0.1, 0.2)),
        (1, Lateness(0.1, 0.2)),
        (2, Lateness(0.5, 0.1)),
        (3, Lateness(0.2, 0.1)),
    ]
    assert paces(beats[:1]) == ()
    assert paces([beat(0, 0.1), beat(1, 0.0, own_steps=0)]) == (), "it has not made a step yet"
    assert median_without([1.0, 2.0, 4.0], 0) == 3.0
    assert median_without([1.0, 2.0, 4.0, 8.0], 2) == 2.0


def test_computation_is_compared_apart_from_the_waiting_for_data():
    beats = [beat(0, 0.75, data_s=0.5), beat(1, 0.25), beat(2, 0.5, data_s=0.0)]
    assert paces(beats) == (
        Pace(0, Lateness(0.75, 0.375), Lateness(0.25, 0.375)),
        Pace(1, Lateness(0.25, 0.625), Lateness(0.25, 0.375)),
        Pace(2, Lateness(0.5, 0.5), Lateness(0.5, 0.25)),
    )


def test_a_rank_is_a_straggler_after_many_slow_steps_in_a_row():
    since: Since = {}
    found: list[tuple[int, tuple[tuple[int, Slowness], ...]]] = []
    for step in range(1, LONG_STEPS + 7):
        own_s = 0.1 if step == 5 else 0.5  # one good step: it begins anew
        since, long = stragglers(since, [beat(0, 0.1, step), beat(1, own_s, step)], factor=3.0)
        if long:
            found.append((step, tuple((p.worker, why) for p, why in long)))
    assert found == [(LONG_STEPS + 6, ((1, Slowness.MACHINE),))]


def test_who_waits_for_its_data_is_no_slow_machine_unless_it_computes_slowly_too():
    def why(own_s: float, data_s: float) -> Slowness | None:
        others = [beat(w, 0.1, data_s=0.02) for w in (0, 1)]
        beats = [*others, beat(2, own_s, data_s=data_s)]
        return paces(beats)[2].slowness(3.0)

    assert why(0.5, 0.42) is Slowness.DATA
    assert why(0.5, 0.3) is Slowness.DATA, "it computes 2.5 times as long"
    assert why(0.5, 0.2) is Slowness.MACHINE
    assert why(0.29, 0.0) is None, "it computes 3.6 times as long, and the steps are not slow"


def test_where_all_wait_for_data_alike_nobody_is_slow():
    beats = [beat(w, 1.0 + 0.1 * w, data_s=0.9 + 0.1 * w) for w in range(3)]
    assert [p.slowness(2.0) for p in paces(beats)] == [None, None, None]


def test_who_waited_for_its_data_becomes_a_slow_machine_anew():
    since: Since = {}
    found: list[tuple[int, Slowness]] = []
    for step in range(1, 3 * LONG_STEPS):
        data_s = 0.4 if step <= LONG_STEPS + 5 else 0.0
        beats = [beat(0, 0.1, step), beat(1, 0.5, step, data_s=data_s)]
        since, long = stragglers(since, beats, factor=3.0)
        found += [(step, why) for _, why in long]
    changed = LONG_STEPS + 6
    assert found == [
        *((step, Slowness.DATA) for step in range(LONG_STEPS + 1, changed)),
        *((step, Slowness.MACHINE) for step in range(changed + LONG_STEPS, 3 * LONG_STEPS)),
    ]


def test_a_large_factor_of_almost_nothing_is_no_straggler():
    beats = [beat(0, 0.0001), beat(1, 0.002)]
    assert stragglers({(1, Slowness.MACHINE): -LONG_STEPS}, beats, factor=3.0) == ({}, ())
