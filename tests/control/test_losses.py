"""What a loss leads to: survivors go on, standbys come, a spent budget ends the run."""

from dataclasses import replace

import pytest

from elastic.control.commands import (
    Abort,
    Form,
    Load,
    Retire,
    Spawn,
    Sync,
)
from elastic.control.events import (
    CollectiveFailed,
    Committed,
    Joined,
    Loaded,
    Paused,
    StopRequested,
    Synced,
    SyncFailed,
    Tick,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.state import (
    Finished,
    Forming,
    Ledger,
    Losses,
    Running,
    Suspending,
    Waiting,
)
from elastic.control.transition import start, transition
from elastic.protocol.membership import Membership
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, play, some, suspended


def test_the_reason_of_a_loss_tells_what_was_seen_of_it():
    why = "others have waited for it for 3.1 s; 3.3 s in compute of step 41"
    hung = WorkerLost(2, "hung", 5.7, 9.0, why)
    assert transition(LEDGER, Running(ABC), hung, LIMITS).reason.startswith(
        f"w2 lost (hung: {why}), 2 of 3 left"
    )


def test_survivors_go_on_with_the_next_step_and_a_replacement_is_spawned():
    ledger, phase, commands = play(
        LEDGER, Running(ABC), lost(0), suspended(1, 40), suspended(2, 40)
    )
    two = Membership(8, (1, 2))
    assert commands == [Abort(ABC), Form(two, 40)]
    assert phase == Forming(two, 39.0)
    assert ledger == Ledger(8, 40, Losses(failures=1), next_worker=3, has_vote=True)
    healed = [Joined(8, 0, 0.0, 9.1), Joined(8, 1, 0.0, 9.1), Committed(8, 41, 0.1, 9.5)]
    ledger, phase, commands = play(ledger, phase, *healed, Tick(9.6))
    assert commands == [Spawn((3,))], "not before the survivors have committed a step"
    assert ledger.spawned == some(3)


def test_a_standby_takes_the_place_of_the_lost_in_the_same_regroup():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    ledger, phase, commands = play(
        ledger, Running(ABC), lost(0), suspended(1, 40), suspended(2, 40)
    )
    assert commands == [Abort(ABC), Sync(3, 1)], "from a survivor, after the Abort"
    assert isinstance(phase, Suspending), "the survivors wait for it"
    ledger, phase, commands = play(ledger, phase, Synced(3, 9.1))
    full = Membership(8, (1, 2, 3))
    assert (commands, phase) == ([Form(full, 40)], Forming(full, 39.1, newcomers=some(3)))
    assert not ledger.slow_copies


def test_a_standby_is_called_where_the_error_was_heard_before_the_loss():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    failed = CollectiveFailed(7, 1, "connection reset", 8.9)
    _, _, commands = play(ledger, Running(ABC), failed, lost(0))
    assert commands == [Abort(ABC), Sync(3, 1)]


def test_survivors_wait_for_a_slow_copy_once_and_not_long():
    limits = replace(LIMITS, standby=1)
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    answers = suspended(1, 40), suspended(2, 40)
    ledger, _, commands = play(
        ledger, Running(ABC), lost(0), *answers, Tick(9.1), Tick(9.3), limits=limits
    )
    two = Membership(8, (1, 2))
    assert commands == [Abort(ABC), Sync(3, 1), Form(two, 40)]
    assert (ledger.syncing, ledger.slow_copies) == (some(3), some(3))
    again = replace(ledger, syncing=some(), standbys=some(3))
    _, _, commands = play(again, Running(two), WorkerLost(1, "process_died", 9.4, 9.5))
    assert commands == [Abort(two)], "it may copy when they train"


def test_a_copy_that_was_not_to_be_is_not_a_slow_one():
    """Who died while it was waited for says nothing of how long the next one will take."""
    limits = replace(LIMITS, standby=1)
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    events = lost(0), suspended(1, 40), suspended(2, 40), Tick(9.3), lost(3, at=9.4)
    ledger, _, _ = play(ledger, Running(ABC), *events, limits=limits)
    assert not ledger.slow_copies
    again, two = replace(ledger, standbys=some(4), next_worker=5), Membership(8, (1, 2))
    _, _, commands = play(again, Running(two), WorkerLost(1, "process_died", 9.4, 9.5))
    assert commands == [Abort(two), Sync(4, 2)]


@pytest.mark.parametrize("is_called", [True, False])
def test_nobody_waits_for_a_newcomer_that_copied_before_the_loss(is_called):
    """It may be anywhere in its copy; a standby that is called may come meanwhile."""
    limits = replace(LIMITS, max_workers=4)
    standbys = some(4) if is_called else some()
    ledger = replace(LEDGER, syncing=some(3), standbys=standbys, next_worker=5)
    answers = suspended(1, 40), suspended(2, 40)
    ledger, phase, commands = play(ledger, Running(ABC), lost(0), *answers, limits=limits)
    if is_called:
        assert isinstance(phase, Suspending)
        ledger, phase, commands = play(ledger, phase, Synced(4, 9.1), limits=limits)
    members = (1, 2, 4) if is_called else (1, 2)
    assert commands[-1] == Form(Membership(8, members), 40)
    assert (ledger.syncing, ledger.slow_copies) == (some(3), some())


def test_no_standby_is_called_for_survivors_who_may_have_no_state():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    _, _, commands = play(ledger, Forming(ABC, 30.0), lost(0))
    assert commands == [Abort(ABC)]
    alone = Membership(7, (0,))
    _, _, commands = play(ledger, Running(alone), lost(0))
    assert Abort(alone) in commands
    assert not any(isinstance(c, Sync) for c in commands)


@pytest.mark.parametrize(
    "news",
    [SyncFailed(3, "gone", 9.1), lost(3, 9.1), StopRequested("SIGINT", 9.1)],
    ids=["its source is gone", "it is gone", "stop"],
)
def test_nobody_waits_for_a_standby_that_will_not_come(news):
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    _, phase, commands = play(
        ledger, Running(ABC), lost(0), suspended(1, 40), news, suspended(2, 40, at=9.2)
    )
    assert [c for c in commands if isinstance(c, Form)] == [
        Form(Membership(8, (1, 2)), 40, then_pause=isinstance(news, StopRequested))
    ]
    ledger, phase, _ = play(ledger, Running(ABC), lost(0), suspended(1, 40), suspended(2, 40))
    ledger, phase, _ = play(ledger, phase, news, Tick(9.15))
    assert isinstance(phase, Forming)
    assert not ledger.slow_copies


def test_nobody_waits_for_a_standby_that_would_enter_later_anyway():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    evaluates = suspended(1, 40, between=True)
    alone = Form(Membership(8, (1, 2)), 40, then_pause=True)
    assert play(ledger, Running(ABC), lost(0), evaluates, suspended(2, 40))[2][-1] == alone
    rolls = Form(Membership(8, (1, 2)), 40, (2,), 1)
    behind = suspended(2, 39, prepared=True)
    assert play(ledger, Running(ABC), lost(0), suspended(1, 40), behind)[2][-1] == rolls


def test_survivors_that_leave_their_step_late_wait_for_the_standby_from_then_on():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    late = suspended(1, 40), suspended(2, 40, at=10.5)
    ledger, _, commands = play(ledger, Running(ABC), lost(0), *late, Tick(10.6), Synced(3, 10.65))
    assert commands[-1] == Form(Membership(8, (1, 2, 3)), 40)
    assert not ledger.slow_copies


def test_a_loss_says_who_how_many_are_left_and_the_budget():
    decision = transition(LEDGER, Running(ABC), lost(1), LIMITS)
    assert decision.reason == "w1 lost (process_died), 2 of 3 left, min 2, budget 1/2"


def test_a_survivor_that_only_prepared_the_step_rolls_forward():
    ledger, _, commands = play(
        LEDGER, Running(ABC), lost(0), suspended(1, 40, prepared=True), suspended(2, 41)
    )
    assert commands[1] == Form(Membership(8, (1, 2)), 41, roll_forward=(1,), vote_of=2)
    assert ledger.step == 41


def test_the_step_that_only_the_lost_rank_committed_is_kept_by_its_reported_vote():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        Committed(7, 41, 0.1, 8.0),
        lost(0),
        suspended(1, 40, prepared=True),
        suspended(2, 40, prepared=True),
    )
    assert commands[1] == Form(Membership(8, (1, 2)), 41, roll_forward=(1, 2), vote_of=None)
    assert ledger.step == 41


def test_a_commit_heard_after_the_abort_still_counts():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        lost(0),
        suspended(1, 40, prepared=True),
        Committed(7, 41, 0.1, 9.0),
        suspended(2, 40, prepared=True),
    )
    assert commands[1] == Form(Membership(8, (1, 2)), 41, roll_forward=(1, 2), vote_of=None)
    assert (ledger.step, ledger.losses.failures) == (41, 1)


def test_a_laggard_without_gradient_copies_the_state_again():
    limits = replace(LIMITS, min_workers=1)
    ledger, _, commands = play(
        LEDGER, Running(ABC), lost(0), suspended(1, 40), suspended(2, 41), limits=limits
    )
    assert commands == [Abort(ABC), Form(Membership(8, (2,)), 41)]
    assert ledger.standbys == some(1)


def test_below_min_the_survivors_wait_and_keep_the_state():
    ledger, phase, commands = play(LEDGER, Running(ABC), lost(0), lost(2), suspended(1, 40))
    assert phase == Waiting("1 of at least 2 workers left, step 40")
    assert commands == [Abort(ABC), Spawn((3, 4))]
    spawned, with_state = some(3, 4), some(1)
    known = Ledger(
        7, 40, Losses(2), next_worker=5, spawned=spawned, with_state=with_state, has_vote=True
    )
    assert ledger == known
    _, phase, commands = play(ledger, phase, WorkerStarted(4, 10.0), Synced(4, 11.0))
    assert commands == [Sync(4, 1), Form(Membership(8, (1, 4)), 40)]


def test_when_all_state_is_lost_it_is_loaded_again():
    ledger = replace(LEDGER, standbys=some(5))
    ledger, _, commands = play(ledger, Running(Membership(7, (0,))), lost(0), Loaded(5, 20, 12.0))
    assert commands == [Abort(Membership(7, (0,))), Load(5), Spawn((3, 4))]
    assert (ledger.step, ledger.with_state) == (20, some(5))


def test_when_all_with_the_state_are_lost_a_follower_is_asked_before_a_fresh_worker():
    ledger = replace(LEDGER, standbys=some(3), synced=some(5))
    alone = Membership(7, (0,))
    ledger, _, commands = play(ledger, Running(alone), lost(0))
    assert commands[:2] == [Abort(alone), Load(5)]
    assert (ledger.standbys, ledger.loading) == (some(3), some(5))
    ledger = replace(LEDGER, standbys=some(3), synced=some(5))
    gone = SyncFailed(5, "source is gone", 4.0)  # it may be faster than the news of the loss
    ledger, _, commands = play(ledger, Running(alone), gone, lost(0, at=5.0), Loaded(5, 40, 6.0))
    assert commands[:2] == [Abort(alone), Load(5)]
    assert (ledger.step, ledger.with_state, ledger.outdated) == (40, some(5), some())


def test_while_a_survivor_evaluates_the_survivors_go_on_alone_and_pause():
    ledger = replace(LEDGER, synced=some(5))
    events = (lost(0), lost(1), suspended(2, 40, between=True))
    ledger, phase, commands = play(ledger, Running(ABC), *events)
    alone = Membership(8, (2,))
    assert commands[1] == Form(alone, 40, then_pause=True)
    _, phase, commands = play(ledger, phase, Joined(8, 0, 0.0, 9.5), Paused(8, 0, 40, 10.0))
    assert commands == [Form(Membership(9, (2, 5)), 40)]
    assert isinstance(phase, Forming)


def test_who_rolls_forward_may_have_to_evaluate_and_newcomers_enter_after_that():
    ledger = replace(LEDGER, synced=some(5))
    behind = [suspended(rank, 40, prepared=True) for rank in (1, 2)]
    events = (Committed(7, 41, 0.1, 8.0), lost(0), *behind)
    ledger, phase, commands = play(ledger, Running(ABC), *events)
    two = Membership(8, (1, 2))
    assert commands[1] == Form(two, 41, roll_forward=(1, 2), then_pause=True)
    joined = [Joined(8, rank, 0.0, 9.5) for rank in (0, 1)]
    paused = [Paused(8, rank, 41, 10.0) for rank in (0, 1)]
    _, _, commands = play(ledger, phase, *joined, *paused)
    assert commands == [Form(Membership(9, (1, 2, 5)), 41)]


def test_who_waits_one_step_behind_rolls_forward_before_newcomers_enter():
    ledger = replace(LEDGER, step=41, with_state=some(1), behind=some(1), syncing=some(5))
    ledger, phase, commands = play(ledger, Waiting("few"), Synced(5, 9.0))
    alone = Membership(8, (1,))
    assert commands[0] == Form(alone, 41, roll_forward=(1,), then_pause=True)
    _, _, commands = play(ledger, phase, Joined(8, 0, 0.0, 9.5), Paused(8, 0, 41, 10.0))
    assert commands[0] == Form(Membership(9, (1, 5)), 41)


@pytest.mark.parametrize("cause", ["unreachable", "device_failed"])
def test_the_place_of_who_cannot_be_reached_is_barred_for_a_minute_and_no_other_one(cause):
    cut = replace(lost(1, 10.0), cause=cause)
    answers = [suspended(rank, 40) for rank in (2,)]
    joined = [Joined(8, 0, 0.0, 12.0, 40)]
    events = (cut, lost(0, 10.0), *answers, *joined, Committed(8, 41, 0.1, 13.0), Tick(14.0))
    limits = replace(LIMITS, min_workers=1)
    ledger, phase, commands = play(LEDGER, Running(ABC), *events, limits=limits)
    assert [c for c in commands if isinstance(c, Spawn)] == [Spawn((3,))]
    assert play(ledger, phase, Tick(69.0), limits=limits)[2] == []
    assert play(ledger, phase, Tick(71.0), limits=limits)[2] == [Spawn((4,))]


def test_a_spent_budget_ends_the_run_with_the_reason():
    ledger = replace(LEDGER, losses=Losses(failures=2), standbys=some(4))
    decision = transition(ledger, Running(ABC), lost(1), LIMITS)
    reason = "w1 lost (process_died): 3 failures since step 40 was committed, max_failures is 2"
    assert decision.phase == Finished("failed", reason)
    assert decision.commands == (Retire((0, 2, 4)),)


def test_a_committed_step_renews_the_budget_but_a_repeated_one_does_not():
    ledger = LEDGER.with_losses(failures=2)
    assert play(ledger, Running(ABC), Committed(7, 40, 0.1, 1.0))[0].losses.failures == 2
    assert play(ledger, Running(ABC), Committed(7, 41, 0.1, 1.0))[0].losses.failures == 0


def test_who_crashes_in_the_same_step_each_time_does_not_begin_again_for_ever():
    """All go back to the same checkpoint, and commit steps that were committed before."""
    limits = replace(LIMITS, min_workers=1, max_workers=1)
    ledger, phase, at = replace(LEDGER, next_worker=1), Running(Membership(7, (0,))), 10.0
    for attempt in range(3):
        worker, generation = attempt + 1, 8 + attempt
        ledger, phase, _ = play(
            ledger,
            phase,
            lost(attempt, at),
            *(WorkerStarted(worker, at), Loaded(worker, 38, at), Joined(generation, 0, 0.0, at)),
            *(Committed(generation, step, 0.1, at) for step in (39, 40)),
            limits=limits,
        )
        if attempt < limits.max_failures:
            losses = ledger.losses
            assert (ledger.step, losses.failures, losses.falls) == (40, 0, attempt + 1)
    assert isinstance(phase, Finished)
    assert phase.reason.startswith("3 times since step 40 was committed nobody was left")


def test_a_loss_while_steps_are_done_again_is_one_loss():
    ledger = LEDGER.with_losses(falls=2, fallen_from=100, failures=2)
    ledger, *_ = play(ledger, Running(ABC), Committed(7, 41, 0.1, 1.0))
    assert (ledger.losses.failures, ledger.losses.falls) == (0, 2)
    ledger, *_ = play(ledger, Running(ABC), Committed(7, 101, 0.1, 1.0))
    assert ledger.losses.falls == 0


def test_workers_that_die_before_they_take_part_are_replaced_ever_more_slowly():
    ledger = replace(LEDGER, spawned=some(3), next_worker=4)
    two = Running(Membership(7, (0, 1)))
    ledger, _, commands = play(ledger, two, lost(3, 10.0), Tick(10.5), Tick(11.0))
    assert commands == [Spawn((4,))]
    ledger, _, commands = play(ledger, two, lost(4, 12.0), Tick(13.5), Tick(14.0))
    assert commands == [Spawn((5,))]


def test_a_run_whose_workers_never_start_fails():
    decision = start(LIMITS, 0.0)
    _, phase, _ = play(decision.ledger, decision.phase, lost(0), lost(1), lost(2))
    assert phase == Finished(
        "failed",
        "3 workers in a row died before they took part, the last w2 (process_died); "
        "max_failures is 2",
    )


def test_a_waiting_run_counts_those_workers_only_that_died_while_it_waits():
    """A bad node, as often as it was tried while the others trained."""
    ledger = replace(LEDGER, spawned=some(3), next_worker=4)
    ledger = ledger.with_losses(stillborn=5, respawn_at=20.0)
    two = Running(Membership(7, (0, 1)))
    ledger, phase, _ = play(ledger, two, lost(1), suspended(0, 40))
    assert isinstance(phase, Waiting)
    assert (ledger.losses.stillborn, ledger.losses.respawn_at) == (0, 20.0)
    ledger, phase, _ = play(ledger, phase, lost(3, 30.0), Tick(31.0), lost(4, 32.0))
    assert isinstance(phase, Waiting)
    _, phase, _ = play(ledger, phase, Tick(34.0), lost(5, 35.0))
    assert isinstance(phase, Finished)
    assert phase.reason.startswith("3 workers in a row died before they took part, the last w5")
