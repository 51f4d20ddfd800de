"""Examples of single decisions, whole values compared; and the table of (phase, event) pairs."""

from dataclasses import replace

from elastic.control.commands import (
    Abort,
    Checkpoint,
    Discard,
    Finish,
    Form,
    Load,
    Pause,
    Publish,
    Retire,
    Spawn,
    Sync,
)
from elastic.control.events import (
    CollectiveFailed,
    Committed,
    Done,
    Ended,
    Event,
    Joined,
    Loaded,
    PartFailed,
    PartSaved,
    Paused,
    StillSaving,
    StopRequested,
    Suspended,
    Synced,
    Tick,
    UserFailed,
    WorkerStarted,
)
from elastic.control.state import (
    Ending,
    Finished,
    Forming,
    Ledger,
    Pausing,
    Running,
    Suspending,
    Waiting,
)
from elastic.control.transition import start, transition
from elastic.protocol.membership import Membership
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, play, some, suspended


# --- start --------------------------------------------------------------------
def test_a_run_starts_at_min_and_grows_to_max():
    decision = start(LIMITS, 0.0)
    assert decision.commands == (Spawn((0, 1, 2)),)
    ledger, phase, commands = play(
        decision.ledger,
        decision.phase,
        WorkerStarted(1, 1.0),
        WorkerStarted(0, 1.0),
        Loaded(1, 0, 2.0),
        Synced(0, 3.0),
    )
    two = Membership(1, (1, 0))
    assert commands == [Load(1), Sync(0, 1), Form(two, 0)]
    assert phase == Forming(two, 33.0, newcomers=some(0))
    ledger, phase, commands = play(
        ledger,
        phase,
        Joined(1, 0, 0.0, 4.0),
        Joined(1, 1, 0.0, 4.0),
        WorkerStarted(2, 5.0),
        Synced(2, 6.0),
        Paused(1, 0, 3, 7.0),
        Paused(1, 1, 3, 7.0),
    )
    three = Membership(2, (1, 0, 2))
    assert commands == [Sync(2, 0), Pause(two), Form(three, 3)]
    assert phase == Forming(three, 37.0, newcomers=some(2))
    assert ledger == Ledger(generation=2, step=3, next_worker=3)


def test_a_resumed_run_goes_on_counting_generations():
    decision = start(LIMITS, 0.0, earlier_generations=5)
    ledger, phase, _ = play(
        decision.ledger, decision.phase,
        WorkerStarted(1, 1.0), WorkerStarted(0, 1.0), Loaded(1, 0, 2.0), Synced(0, 3.0),
    )  # fmt: skip
    assert phase == Forming(Membership(6, (1, 0)), 33.0, newcomers=some(0))
    assert ledger.num_generations == 1


def test_warm_standbys_wait_without_state():
    limits = replace(LIMITS, standby=1)
    ledger = replace(LEDGER, spawned=some(3), next_worker=4)
    ledger, phase, commands = play(ledger, Running(ABC), WorkerStarted(3, 1.0), limits=limits)
    assert (ledger.standbys, phase, commands) == (some(3), Running(ABC), [])


# --- the fence ------------------------------------------------------------------
def test_nothing_from_a_dead_generation_counts():
    late: tuple[Event, ...] = (
        Joined(6, 0, 0.0, 1.0),
        Committed(6, 99, 0.1, 1.0),
        Paused(6, 0, 99, 1.0),
        CollectiveFailed(6, 0, "reset", 1.0),
        Suspended(6, 0, 99, False, False, 1.0),
        Done(6, 0, 99, 1.0),
        Ended(6, 0, "x", 1.0),
    )
    for phase in (Running(ABC), Waiting("few"), Finished("failed", "")):
        assert play(LEDGER, phase, *late) == (LEDGER, phase, [])


def test_a_lost_member_cannot_answer():
    suspending = Suspending(ABC, some(0), None)
    assert play(LEDGER, suspending, suspended(0, 99)) == (LEDGER, suspending, [])


def test_a_worker_that_is_no_part_of_the_run_is_retired():
    for phase in (Running(ABC), Finished("succeeded", "")):
        assert play(LEDGER, phase, WorkerStarted(9, 1.0)) == (LEDGER, phase, [Retire((9,))])


# --- stop and end ------------------------------------------------------------------
def test_a_step_that_is_said_again_at_the_end_is_no_news():
    ending = Ending(ABC, "succeeded", "", 30.0)
    assert play(LEDGER, ending, Committed(7, 40, 0.1, 9.0)) == (LEDGER, ending, [])


def test_a_requested_stop_pauses_at_a_step_boundary_and_says_the_hash():
    pauses = [Paused(7, rank, 41, 2.0) for rank in range(3)]
    _, phase, commands = play(LEDGER, Running(ABC), StopRequested("SIGINT", 1.0), *pauses)
    assert commands == [Pause(ABC), Finish(ABC, "stopped")]
    assert phase == Ending(ABC, "stopped", "SIGINT", 32.0)
    _, phase, commands = play(LEDGER, phase, *(Ended(7, rank, "ab", 3.0) for rank in range(3)))
    assert phase == Finished("stopped", "SIGINT", "ab")
    assert commands == [Retire((0, 1, 2))]


def test_a_stop_before_anybody_holds_the_state_ends_at_once():
    decision = start(LIMITS, 0.0)
    stop = StopRequested("SIGINT", 1.0)
    _, phase, commands = play(decision.ledger, decision.phase, WorkerStarted(0, 0.5), stop)
    assert phase == Finished("stopped", "SIGINT")
    assert commands == [Load(0), Retire((0, 1, 2))]


def test_a_stop_while_waiting_lets_those_with_the_state_end_it_even_below_min():
    ledger = replace(LEDGER, with_state=some(1), spawned=some(3))
    _, _, commands = play(ledger, Waiting("few"), StopRequested("SIGINT", 1.0))
    assert commands == [Form(Membership(8, (1,)), 40, then_pause=True)]


def test_a_loss_during_a_stop_does_not_bring_replacements():
    ledger = replace(LEDGER, stop="SIGINT")
    pausing = Pausing(ABC, paused=some(1))
    _, _, commands = play(ledger, pausing, lost(0), suspended(1, 41), suspended(2, 41))
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 41, then_pause=True)]


def test_the_run_succeeds_when_every_loop_has_returned():
    done = [Done(7, rank, 100, 2.0) for rank in range(3)]
    _, phase, commands = play(LEDGER, Running(ABC), Committed(7, 100, 0.1, 1.0), *done)
    assert commands == [Finish(ABC, "succeeded")]
    why = "the training loop has returned after step 100"
    assert phase == Ending(ABC, "succeeded", why, 32.0)


def test_members_that_get_further_with_the_final_state_have_more_time():
    ending = Ending(ABC, "succeeded", "", 32.0)
    ledger, phase, commands = play(
        LEDGER, ending, StillSaving(7, 1, 30.0), StillSaving(6, 1, 50.0), Tick(59.9)
    )
    assert (phase, commands) == (Ending(ABC, "succeeded", "", 60.0), [])
    _, phase, _ = play(ledger, phase, Tick(60.0))
    assert isinstance(phase, Finished)
    assert phase.reason == "no member said the hash of the final weights of step 40 in time"


def test_when_a_member_is_lost_at_the_end_the_others_write_the_state_again():
    ending = Ending(ABC, "succeeded", "", 32.0, ended=some(0, 1), weights_sha256="ab")
    saved = PartSaved(7, 0, 40, 2.0)
    ledger, phase, commands = play(LEDGER, ending, saved, lost(2, at=5.0))
    two = Membership(8, (0, 1))
    assert commands == [Discard(7, 40), Finish(two, "succeeded")]
    assert phase == Ending(two, "succeeded", "", 35.0, weights_sha256="ab")
    parts = [PartSaved(8, rank, 40, 6.0) for rank in (0, 1)]
    ended = [Ended(8, rank, "ab", 7.0) for rank in (0, 1)]
    _, phase, commands = play(ledger, phase, Ended(7, 2, "ab", 5.5), *parts, *ended)
    assert commands == [Publish(8, 40), Retire((0, 1))]
    assert phase == Finished("succeeded", "", "ab")


def test_the_end_is_not_awaited_for_ever():
    ending = Ending(ABC, "succeeded", "", 32.0, ended=some(0), weights_sha256="ab")
    _, phase, _ = play(LEDGER, ending, Tick(32.0))
    assert phase == Finished("succeeded", "", "ab")
    _, phase, _ = play(LEDGER, replace(ending, weights_sha256=""), Tick(32.0))
    assert isinstance(phase, Finished)
    assert phase.outcome == "failed"


# --- checkpoints -------------------------------------------------------------------
def test_a_checkpoint_is_published_once_every_part_is_durable():
    parts = [PartSaved(7, rank, 40, 2.0) for rank in (2, 0, 1)]
    decision = play(LEDGER, Running(ABC), *parts[:2])
    assert decision[2] == []
    ledger, _, commands = play(decision[0], decision[1], parts[2])
    assert commands == [Publish(7, 40)]
    assert ledger == LEDGER


def test_a_save_that_its_generation_did_not_finish_is_discarded_and_never_published():
    ledger, phase, commands = play(
        LEDGER, Running(ABC), PartSaved(7, 0, 40, 2.0), PartSaved(7, 1, 40, 2.0), lost(2)
    )
    assert commands == [Abort(ABC)]
    ledger, phase, commands = play(ledger, phase, suspended(0, 40), suspended(1, 40))
    assert commands == [Discard(7, 40), Form(Membership(8, (0, 1)), 40)]
    assert play(ledger, phase, PartSaved(7, 2, 40, 9.0)) == (ledger, phase, [])


def test_a_part_that_cannot_be_written_discards_the_save_and_training_goes_on():
    failed = PartFailed(7, 1, 40, "No space left on device", 2.0)
    decision = transition(LEDGER, Running(ABC), failed, LIMITS)
    assert decision.commands == (Discard(7, 40),)
    assert decision.reason == (
        "the checkpoint of step 40 failed at rank 1: No space left on device"
    )
    others = [PartSaved(7, 0, 40, 3.0), PartSaved(7, 2, 40, 3.0), replace(failed, rank=2)]
    ledger, phase, commands = play(decision.ledger, decision.phase, *others)
    assert commands == []
    again = [Committed(7, 50, 0.1, 4.0), *(PartSaved(7, rank, 50, 4.0) for rank in range(3))]
    assert play(ledger, phase, *again)[2] == [Publish(7, 50)]
    strict = transition(LEDGER, Running(ABC), failed, replace(LIMITS, must_save=True))
    assert strict.phase == Finished(
        "failed", "the checkpoint of step 40 failed: No space left on device"
    )


def test_a_checkpoint_waits_for_its_step_to_be_on_record():
    """Over another connection its parts are said before the steps."""
    parts = [PartSaved(7, rank, 42, 4.0) for rank in range(3)]
    ledger, phase, commands = play(LEDGER, Running(ABC), *parts, Committed(7, 41, 0.1, 4.1))
    assert commands == []
    assert play(ledger, phase, Committed(7, 42, 0.1, 4.2))[2] == [Publish(7, 42)]


TIMED = replace(LIMITS, save_every_s=600.0)


def committed(step: int, at: float) -> Committed:
    return Committed(7, step, 0.1, at)


def test_a_step_is_saved_when_the_last_checkpoint_is_old():
    """The time is the steps': who commits none has none to lose."""
    asked = transition(LEDGER, Running(ABC), committed(41, 600.5), TIMED)
    assert asked.commands == (Checkpoint(ABC, 41),)
    assert asked.reason == "no checkpoint for 600 s: the next step is saved"
    on_time = [committed(41, 599.0), Tick(700.0), committed(42, 701.0), committed(43, 1300.0)]
    ledger, _, commands = play(LEDGER, Running(ABC), *on_time, limits=TIMED)
    assert commands == [Checkpoint(ABC, 42)]
    again = play(ledger, Running(ABC), committed(44, 1301.0), limits=TIMED)
    assert again[2] == [Checkpoint(ABC, 44)], "nothing came of the first one"


def test_a_checkpoint_of_any_origin_puts_the_next_one_off():
    parts = [PartSaved(7, rank, 40, 500.0 + rank) for rank in range(3)]
    events = [*parts, committed(41, 650.0), committed(42, 1101.0), committed(43, 1102.5)]
    _, _, commands = play(LEDGER, Running(ABC), *events, limits=TIMED)
    assert commands == [Publish(7, 40), Checkpoint(ABC, 43)]


def test_a_save_that_was_lost_with_its_generation_is_asked_for_again():
    events = [committed(41, 600.0), lost(2, 601.0), suspended(0, 41), suspended(1, 41)]
    joined = [Joined(8, rank, 0.0, 602.0) for rank in (0, 1)]
    step = Committed(8, 42, 0.1, 603.0)
    ledger = replace(LEDGER, spawned=some(3))
    _, _, commands = play(ledger, Running(ABC), *events, *joined, step, limits=TIMED)
    two = Membership(8, (0, 1))
    assert commands == [Checkpoint(ABC, 41), Abort(ABC), Form(two, 41), Checkpoint(two, 42)]


def test_no_step_is_saved_for_its_age_where_another_save_comes_anyway():
    last = [committed(100, 700.0)]
    assert play(LEDGER, Running(ABC), *last, limits=TIMED)[2] == []
    assert play(LEDGER, Pausing(ABC), committed(41, 700.0), limits=TIMED)[2] == []
    assert play(LEDGER, Running(ABC), committed(41, 700.0))[2] == [], "there are no checkpoints"


def test_differing_final_weights_fail_the_run():
    ending = Ending(ABC, "succeeded", "", 32.0, ended=some(0), weights_sha256="ab")
    _, phase, _ = play(LEDGER, ending, Ended(7, 2, "cd", 3.0))
    assert phase == Finished(
        "failed", "the final weights differ: rank 2 (w2) has cd, another rank ab"
    )


def test_after_the_last_step_survivors_below_min_still_finish():
    ledger = replace(LEDGER, step=100)
    events = (lost(0), lost(1), suspended(2, 100))
    _, _, commands = play(ledger, Running(ABC, done=some(0)), *events)
    assert commands[1] == Form(Membership(8, (2,)), 100)


def test_a_user_error_fails_the_run_and_retires_everyone():
    ledger = replace(LEDGER, standbys=some(4), spawned=some(5))
    message = "ValueError: no\n  File ..."
    decision = transition(ledger, Running(ABC), UserFailed(1, message, 1.0), LIMITS)
    assert decision.phase == Finished("failed", f"w1: {message}")
    assert decision.commands == (Retire((0, 1, 2, 4, 5)),)
    assert decision.reason == "w1: ValueError: no"
