"""Who counts as hung: the rule over heartbeats, case by case."""

from dataclasses import replace

import pytest

from elastic.control.detection.hang import (
    Cut,
    Heartbeat,
    Watch,
    hear_cut,
    last_move,
    suspects,
    suspicion,
    watch,
)

BEAT = Heartbeat(
    worker=1,
    generation=4,
    step=9,
    phase="forward",
    phase_s=6.0,
    p95_s=1.0,
    waits_for_peers=False,
    process_state="R",
)
WAITING = replace(BEAT, worker=2, phase="reduce", phase_s=4.0, waits_for_peers=True)


def test_a_worker_that_a_peer_waits_for_far_longer_than_usual_is_suspect():
    assert suspicion(Watch(BEAT, 10.0), 4.0, 10.0, detect_s=3.0) == (
        "others have waited for it for 4.0 s; 6.0 s in forward of step 10 (usually under 1.00 s)"
    )


@pytest.mark.parametrize(
    ("beat", "awaited_s"),
    [
        (BEAT, None),  # nobody waits, it is heard
        (BEAT, 2.0),  # not for long
        (replace(BEAT, phase_s=4.9), 4.0),  # within five times its usual time
        (replace(BEAT, phase_s=2.9, p95_s=0.1), 9.0),  # slow, but it went on just before
        (replace(BEAT, p95_s=None, phase_s=299.0), 299.0),  # first step, compilation, user code
        (replace(BEAT, p95_s=0.1, is_new_there=True, phase_s=29.9), 29.9),  # its first few steps
    ],
)
def test_patience(beat: Heartbeat, awaited_s: float | None):
    assert suspicion(Watch(beat, 10.0), awaited_s, 10.0, detect_s=3.0) is None


def test_without_a_usual_time_patience_is_a_hundred_times_longer():
    beat = replace(BEAT, p95_s=None, phase_s=301.0)
    assert suspicion(Watch(beat, 10.0), 290.0, 10.0, detect_s=3.0)


def test_a_usual_time_of_a_few_steps_is_believed_after_a_longer_wait():
    beat = replace(BEAT, p95_s=0.1, is_new_there=True, phase_s=30.1)
    assert suspicion(Watch(beat, 10.0), 30.0, 10.0, detect_s=3.0) is not None
    slow = replace(beat, p95_s=7.0)
    assert suspicion(Watch(slow, 10.0), 30.0, 10.0, detect_s=3.0) is None


def test_a_newcomer_that_hangs_in_user_code_is_suspect_though_nobody_waits_for_it():
    building = replace(BEAT, generation=0, step=0, phase="starting", p95_s=None, phase_s=299.0)
    late = replace(building, phase_s=301.0)
    assert suspicion(Watch(building, 10.0), None, 10.0, detect_s=3.0) is None
    assert suspicion(Watch(late, 10.0), None, 10.0, detect_s=3.0) == (
        "it has not started; 301.0 s in starting of step 1 (no usual time known)"
    )
    timeouts = replace(late, phase="pool")
    assert suspicion(Watch(timeouts, 10.0), None, 10.0, detect_s=3.0) is None


def test_long_silence_needs_no_history_of_the_phase():
    beat = replace(BEAT, p95_s=None, phase_s=0.5)
    assert suspicion(Watch(beat, 10.0), None, 15.9, detect_s=3.0) is None
    assert suspicion(Watch(beat, 10.0), None, 16.1, detect_s=3.0) == "no heartbeat for 6.1 s"


def test_silence_counts_as_time_in_the_phase():
    silent = Watch(replace(BEAT, phase_s=0.5), 10.0)
    assert suspicion(silent, None, 14.0, detect_s=3.0) is None
    assert suspicion(silent, None, 15.0, detect_s=3.0) == (
        "no heartbeat for 5.0 s; 5.5 s in forward of step 10 (usually under 1.00 s)"
    )


def test_a_stopped_process_is_suspect_however_long_its_phase_may_take():
    beat = replace(BEAT, p95_s=None, process_state="T")
    seen = watch(watch(None, beat, 10.0), beat, 12.0)
    assert suspicion(seen, None, 12.9, detect_s=3.0) is None
    assert suspicion(seen, None, 13.5, detect_s=3.0) == (
        "its process has been stopped for 3.5 s, in forward of step 10"
    )
    assert watch(seen, replace(beat, process_state="S"), 13.0).stopped_since is None


def test_the_last_sign_of_life_is_the_trainers_and_not_its_pulses():
    assert last_move(Watch(BEAT, 10.0)) == 4.0, "it entered the phase"
    stopped = replace(BEAT, process_state="T")
    seen = watch(watch(Watch(BEAT, 8.0), stopped, 8.5), stopped, 11.0)
    assert last_move(seen) == 8.0, "it was not stopped yet"
    assert last_move(watch(None, replace(stopped, stopped_s=2.0), 11.0)) == 9.0


def test_a_dead_process_is_suspect_at_once():
    beat = replace(BEAT, process_state="Z")
    assert suspicion(Watch(beat, 10.0), None, 10.0, 3.0) == "its process is dead (state Z)"


def test_hang_detection_can_be_off():
    silent = Watch(replace(BEAT, process_state="Z"), 0.0)
    assert suspicion(silent, 1e9, 1e9, detect_s=None) is None


def test_who_waits_is_waited_for_only_by_those_ahead():
    def late(worker: Heartbeat, peer: Heartbeat) -> list[int]:
        watches = [Watch(replace(b, phase_s=99.0, p95_s=0.1), 10.0) for b in (worker, peer)]
        return [w for w, _ in suspects(watches, 10.0, 3.0)]

    assert late(BEAT, WAITING) == [1]
    assert late(BEAT, replace(BEAT, worker=2)) == []
    assert late(replace(WAITING, worker=3), WAITING) == []
    assert late(replace(WAITING, worker=3, step=8), WAITING) == [3]
    assert late(replace(BEAT, step=10), WAITING) == []
    assert late(replace(BEAT, generation=3), WAITING) == []


def test_who_waits_longest_tells_how_long_a_worker_is_awaited():
    """In its own step or a later one, in its own generation."""
    beats = [
        BEAT,
        WAITING,
        replace(WAITING, worker=3, phase_s=9.0, p95_s=0.1),
        replace(WAITING, worker=4, step=8, phase_s=12.0, p95_s=0.1),
        replace(BEAT, worker=5, generation=3, phase_s=99.0),
        replace(BEAT, worker=6, phase_s=2.0),
        replace(BEAT, worker=7, step=10, phase_s=99.0),
        replace(BEAT, worker=8, step=8, phase_s=99.0),
    ]
    found = dict(suspects([Watch(b, 10.0) for b in beats], 10.0, 3.0))
    assert {worker: why.partition(";")[0] for worker, why in found.items()} == {
        worker: f"others have waited for it for {awaited_s:.1f} s"
        for worker, awaited_s in ((1, 9.0), (4, 9.0), (8, 12.0))
    }


def test_a_member_whose_loop_has_returned_while_others_wait_for_it_is_suspect():
    done = replace(BEAT, phase="done", phase_s=3.2, p95_s=0.0)
    found = dict(suspects([Watch(done, 10.0), Watch(WAITING, 10.0)], 10.0, 3.0))
    assert found == {
        1: "others have waited for it for 4.0 s; 3.2 s in done of step 10 (usually under 0.00 s)"
    }
    ended = [Watch(replace(done, worker=w, phase_s=99.0), 10.0) for w in (1, 2)]
    assert not dict(suspects(ended, 10.0, 3.0)), "all have returned"


def test_a_member_that_has_done_the_last_step_is_not_what_those_wait_for_who_are_in_it():
    """It passed a vote that a member which froze then, worker 3, kept the other one in."""
    done = replace(BEAT, step=10, phase="done", phase_s=4.5, p95_s=0.0)
    votes = replace(WAITING, phase="vote", phase_s=4.0)
    frozen = replace(votes, worker=3, process_state="T")
    watches = [Watch(done, 10.0), Watch(votes, 10.0), Watch(frozen, 10.0, stopped_since=6.0)]
    assert dict(suspects(watches, 10.0, 3.0)) == {
        3: "its process has been stopped for 4.0 s, in vote of step 10"
    }


@pytest.mark.parametrize("place", ["done", "pool"])
def test_a_member_that_hangs_behind_the_last_vote_is_awaited_by_those_who_are_through(place):
    """They have returned from their loops, or are at the pause that the vote has told them of."""
    through = replace(BEAT, step=10, phase=place, phase_s=4.5, p95_s=None)
    rest = [Watch(replace(through, worker=w), 10.0) for w in (2, 3)]
    for hangs in (
        replace(BEAT, phase="apply", phase_s=4.5, p95_s=0.1),
        replace(BEAT, phase="user", step=10, phase_s=301.0, p95_s=None),
    ):
        found = dict(suspects([Watch(hangs, 10.0), *rest], 10.0, 3.0))
        assert list(found) == [1]
        assert found[1].startswith("others have waited for it for 4.5 s")
    for is_well in (
        replace(BEAT, phase="user", step=10, phase_s=299.0, p95_s=None),
        replace(BEAT, phase="save", step=10, phase_s=1e6, p95_s=None),
        replace(through, phase_s=1e6),
        replace(BEAT, step=11, phase_s=99.0),
        replace(BEAT, generation=3, phase_s=99.0),
    ):
        assert not dict(suspects([Watch(is_well, 10.0), *rest], 10.0, 3.0))


def test_nobody_waits_in_the_pool_of_no_generation():
    newcomers = replace(BEAT, generation=0, phase="pool", phase_s=99.0, p95_s=None)
    builds = replace(newcomers, worker=2, phase="starting")
    assert not dict(suspects([Watch(b, 10.0) for b in (newcomers, builds)], 10.0, 3.0))


def test_who_does_not_answer_that_its_generation_is_given_up_is_awaited():
    """A second fault: one member is lost while another one hangs in its own code."""
    peer = replace(WAITING, phase="pool", phase_s=2.0, waits_for_peers=False, p95_s=None)
    watches = [Watch(b, 10.0) for b in (BEAT, peer)]
    assert dict(suspects(watches, 10.0, 3.0, {1: 6.9, 2: 6.9})) == {
        1: "others have waited for it for 3.1 s; 6.0 s in forward of step 10 (usually under 1.00 s)"
    }
    assert not dict(suspects(watches, 10.0, 3.0, {1: 7.1}))
    assert not dict(suspects(watches, 10.0, 3.0))


def test_members_that_are_silent_all_at_once_may_only_be_cut_off():
    """Nothing could go on without them, and they train on: their lease is as long as ours."""
    silent = [Watch(replace(BEAT, worker=w, p95_s=0.1), 10.0) for w in (1, 2)]
    standby = Watch(replace(BEAT, worker=3, generation=0, phase="pool"), 10.1)
    assert not dict(suspects([*silent, standby], 17.0, 3.0)), "with them it may be cut off, too"
    assert not dict(suspects([*silent, standby], 39.9, 3.0))
    assert [w for w, _ in suspects([*silent, standby], 40.1, 3.0)] == [1, 2, 3]
    heard = Watch(replace(BEAT, worker=4, p95_s=0.1), 19.0)
    assert [w for w, _ in suspects([*silent, heard], 20.0, 3.0)] == [1, 2]


def test_after_a_cut_members_may_come_back_one_by_one():
    """Each connection sends again when its own backoff is over."""
    silent = [Watch(replace(BEAT, worker=w, p95_s=0.1), 10.0 + w / 10) for w in (1, 2, 3)]
    cut = None
    for now in (11.0, 13.15, 13.25, 14.0, 18.0, 22.3):
        cut = hear_cut(cut, silent, now, 3.0)
        assert not dict(suspects(silent, now, 3.0, cut=cut))
    assert cut == Cut(begun_at=11.8, last_at=22.3, length_s=pytest.approx(12.0))
    for now in (22.6, 25.0, 34.2):
        watches = [replace(silent[0], heard_at=now - 0.1), *silent[1:]]
        cut = hear_cut(cut, watches, now, 3.0)
        assert not dict(suspects(watches, now, 3.0, cut=cut)), now
    assert [w for w, _ in suspects(watches, 34.4, 3.0, cut=cut)] == [2, 3]


def test_a_cut_that_lasts_too_long_spares_nobody_any_more():
    silent = [Watch(replace(BEAT, worker=w, p95_s=0.1), 10.0) for w in (1, 2)]
    cut = hear_cut(None, silent, 39.9, 3.0)
    assert cut is not None
    assert hear_cut(cut, silent, 40.1, 3.0) is None
    assert [w for w, _ in suspects(silent, 40.1, 3.0, cut=cut)] == [1, 2]


# --- state that a generation needs ----------------------------------------------------
PIECE = replace(BEAT, step=0, phase="restore", p95_s=None)
"""Storage that never answers; the phase is entered again with each piece."""
MEETS = replace(PIECE, worker=2, phase="exchange", waits_for_peers=True, phase_s=900.0)


def test_of_those_who_get_their_state_the_one_that_gets_no_further_is_suspect_alone():
    stuck, slow = replace(PIECE, phase_s=301.0), replace(PIECE, worker=3, phase_s=299.0)
    watches = [Watch(beat, 10.0) for beat in (stuck, slow, MEETS)]
    place = "301.0 s in restore of step 1 (no usual time known)"
    assert dict(suspects(watches, 10.0, 3.0)) == {
        1: f"others have waited for it for 900.0 s; {place}"
    }


def test_who_hangs_in_its_state_is_suspect_where_nobody_waits_for_it():
    """All of them read from one storage, or there is no other member."""
    assert list(suspects([Watch(replace(PIECE, phase_s=299.0), 10.0)], 10.0, 3.0)) == []
    assert dict(suspects([Watch(replace(PIECE, phase_s=301.0), 10.0)], 10.0, 3.0)) == {
        1: "it does not get on with its state; 301.0 s in restore of step 1 (no usual time known)"
    }
