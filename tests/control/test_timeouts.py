"""Everything that waits derives from `detect_s`, and what cannot hold is refused at start."""

from dataclasses import replace

import pytest

from elastic.protocol.timeouts import MAX_DETECT_S, MIN_DETECT_S, Timeouts, timeouts_of


def test_the_waits_of_the_default():
    assert timeouts_of(3.0) == Timeouts(
        heartbeat_s=0.5,
        tick_s=0.25,
        late_s=0.5,
        diagnosis_s=0.5,
        confirm_s=4.25,
        cold_s=300.0,
        join_s=30.0,
        silence_s=3.0,
        lease_s=30.0,
        start_s=300.0,
        rendezvous_s=6.0,
        controller_s=15.0,
        stall_s=150.0,
        end_s=300.0,
        operation_s=300.0,
    )


@pytest.mark.parametrize("detect_s", [None, MIN_DETECT_S, 1.0, 17.0, MAX_DETECT_S])
def test_a_hang_is_seen_and_explained_before_anything_else_gives_up(detect_s):
    timeouts = timeouts_of(detect_s)
    explained_s = timeouts.heartbeat_s + timeouts.tick_s + timeouts.diagnosis_s
    assert (detect_s or 0.0) + explained_s <= timeouts.confirm_s
    assert timeouts.late_s < (detect_s or 3.0)


def test_combinations_that_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="must hold"):
        replace(timeouts_of(3.0), confirm_s=0.4)
    with pytest.raises(ValueError, match=r"detect_s=0\.1 must be from 0\.5, as a busy machine"):
        timeouts_of(0.1)
    with pytest.raises(ValueError, match=r"to 3600: or give None"):
        timeouts_of(1e9)
