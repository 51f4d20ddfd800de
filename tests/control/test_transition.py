"""Examples of single decisions, whole values compared; and the table of (phase, event) pairs."""

from dataclasses import replace

import pytest

from elastic.control.commands import (
    Abort,
    Checkpoint,
    Command,
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
    SyncFailed,
    Tick,
    UserFailed,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.recovery import MAX_IN_VAIN
from elastic.control.state import (
    Ending,
    Finished,
    Forming,
    Ledger,
    Limits,
    Pausing,
    Phase,
    Running,
    Suspending,
    Waiting,
)
from elastic.control.transition import start, transition
from elastic.protocol.membership import Membership, NumberSet

LIMITS = Limits(
    min_workers=2,
    max_workers=3,
    standby=0,
    steps=100,
    max_failures=2,
    join_timeout_s=30,
    end_timeout_s=30,
    confirm_timeout_s=3,
)
ABC = Membership(7, (0, 1, 2))
LEDGER = Ledger(generation=7, step=40, next_worker=3)


def some(*numbers: int) -> NumberSet:
    return NumberSet.of(numbers)


def play(ledger: Ledger, phase: Phase, *events: Event, limits: Limits = LIMITS):
    commands: list[Command] = []
    for event in events:
        ledger, phase, new, _ = transition(ledger, phase, event, limits)
        commands += new
    return ledger, phase, commands


def lost(worker: int, at: float = 9.0) -> WorkerLost:
    return WorkerLost(worker, "process_died", at - 0.1, at)


def suspended(rank: int, step: int, *, prepared: bool = False, between: bool = False, at=9.0):
    return Suspended(7, rank, step, prepared, between, at)


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


# --- losses -------------------------------------------------------------------
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
    assert ledger == Ledger(8, 40, failures=1, next_worker=3, has_vote=True)
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
    assert not ledger.is_copy_slow


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
    assert (ledger.syncing, ledger.is_copy_slow) == (some(3), True)
    again = replace(ledger, syncing=some(), standbys=some(3))
    _, _, commands = play(again, Running(two), WorkerLost(1, "process_died", 9.4, 9.5))
    assert commands == [Abort(two)], "it may copy when they train"


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
    assert not ledger.is_copy_slow


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
    assert not ledger.is_copy_slow


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
    assert (ledger.step, ledger.failures) == (41, 1)


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
    known = Ledger(7, 40, 2, next_worker=5, spawned=spawned, with_state=with_state, has_vote=True)
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
    ledger = replace(LEDGER, failures=2, standbys=some(4))
    decision = transition(ledger, Running(ABC), lost(1), LIMITS)
    reason = "w1 lost (process_died): 3 failures since step 40 was committed, max_failures is 2"
    assert decision.phase == Finished("failed", reason)
    assert decision.commands == (Retire((0, 2, 4)),)


def test_a_committed_step_renews_the_budget_but_a_repeated_one_does_not():
    ledger = replace(LEDGER, failures=2)
    assert play(ledger, Running(ABC), Committed(7, 40, 0.1, 1.0))[0].failures == 2
    assert play(ledger, Running(ABC), Committed(7, 41, 0.1, 1.0))[0].failures == 0


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
            assert (ledger.step, ledger.failures, ledger.falls) == (40, 0, attempt + 1)
    assert isinstance(phase, Finished)
    assert phase.reason.startswith("3 times since step 40 was committed nobody was left")


def test_a_loss_while_steps_are_done_again_is_one_loss():
    ledger = replace(LEDGER, falls=2, fallen_from=100, failures=2)
    ledger, *_ = play(ledger, Running(ABC), Committed(7, 41, 0.1, 1.0))
    assert (ledger.failures, ledger.falls) == (0, 2)
    ledger, *_ = play(ledger, Running(ABC), Committed(7, 101, 0.1, 1.0))
    assert ledger.falls == 0


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
    ledger = replace(LEDGER, spawned=some(3), next_worker=4, stillborn=5, respawn_at=20.0)
    two = Running(Membership(7, (0, 1)))
    ledger, phase, _ = play(ledger, two, lost(1), suspended(0, 40))
    assert isinstance(phase, Waiting)
    assert (ledger.stillborn, ledger.respawn_at) == (0, 20.0)
    ledger, phase, _ = play(ledger, phase, lost(3, 30.0), Tick(31.0), lost(4, 32.0))
    assert isinstance(phase, Waiting)
    _, phase, _ = play(ledger, phase, Tick(34.0), lost(5, 35.0))
    assert isinstance(phase, Finished)
    assert phase.reason.startswith("3 workers in a row died before they took part, the last w5")


# --- generations that fail without a known loss -------------------------------------
def test_a_failed_collective_waits_for_the_loss_that_explains_it():
    failed = CollectiveFailed(7, 1, "connection reset", 9.0)
    _, _, commands = play(
        LEDGER, Running(ABC), failed, suspended(1, 40), suspended(2, 40), lost(0, 9.1)
    )
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]


def test_a_call_that_the_backend_refused_surfaces_if_no_loss_explains_it():
    failed = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, phase, commands = play(LEDGER, Running(ABC), failed, *answers, Tick(11.9), Tick(12.0))
    assert phase == Finished("failed", "no worker is lost, but sizes differ")
    assert commands == [Abort(ABC), Retire((0, 1, 2))]


@pytest.mark.parametrize(
    "said",
    [
        "unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete",
        "pair.cc:612] Application timeout caused pair closure",
        "pair.cc:553] Connection closed by peer [127.0.0.1]:7603.",
        "pair.cc:537] Read error [127.0.0.1]:5044: Connection reset by peer.",
        "Gloo connectFullMesh failed with [pair.cc:144] no error",
        "Wait timeout",
        "Connect timeout [127.0.0.1]:5044",
        "Failed to recv, got 0 bytes. Connection was likely closed.",
        "Remote peer closed the connection.",
        "words of a release to come",
    ],
)
def test_whatever_a_backend_says_of_its_connections_the_same_members_try_again(said: str):
    failed = CollectiveFailed(7, 1, said, 9.0)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, _, commands = play(LEDGER, Running(ABC), failed, *answers, Tick(12.0))
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]


def test_a_connection_that_broke_between_the_living_is_made_again_but_not_for_ever():
    ledger, phase, commands = LEDGER, Running(ABC), []
    for generation in (7, 8):
        failed = CollectiveFailed(generation, 1, "Read error: Connection reset by peer", 9.0)
        answers = [Suspended(generation, rank, 40, False, False, 9.0) for rank in range(3)]
        joined = [Joined(generation + 1, rank, 0.0, 12.0, 40) for rank in range(3)]
        ledger, phase, new = play(ledger, phase, failed, *answers, Tick(12.0), *joined)
        commands += new
    again = [Membership(n, (0, 1, 2)) for n in (8, 9)]
    assert [c.membership for c in commands if isinstance(c, Form)] == again
    assert ledger.failures == 2
    failed = CollectiveFailed(9, 1, "Read error: Connection reset by peer", 13.0)
    answers = [Suspended(9, rank, 40, False, False, 13.0) for rank in range(3)]
    _, phase, _ = play(ledger, phase, failed, *answers, Tick(16.0))
    assert isinstance(phase, Finished)
    assert phase.outcome == "failed"


def test_a_generation_in_which_everybody_waits_is_tried_again_but_not_for_ever():
    ledger, phase, commands = LEDGER, Running(ABC), []
    for generation in (7, 8):
        stall = CollectiveFailed(generation, 0, "all 3 members wait", 9.0, is_stall=True)
        answers = [Suspended(generation, rank, 40, False, False, 9.0) for rank in range(3)]
        joined = [Joined(generation + 1, rank, 0.0, 9.0, 40) for rank in range(3)]
        ledger, phase, new = play(ledger, phase, stall, *answers, *joined)
        commands += new
    again = [Membership(n, (0, 1, 2)) for n in (8, 9)]
    assert commands == [Abort(ABC), Form(again[0], 40), Abort(again[0]), Form(again[1], 40)]
    assert phase == Running(again[1])
    stall = CollectiveFailed(9, 0, "all 3 members wait", 9.0, is_stall=True)
    assert transition(ledger, phase, stall, LIMITS).phase == Finished(
        "failed",
        "all 3 members wait: 3 failures since step 40 was committed, max_failures is 2",
    )


@pytest.mark.parametrize("answered_before", [0, 2, 3])
def test_what_needs_no_loss_is_heard_behind_its_consequences(answered_before):
    closed = CollectiveFailed(7, 1, "Connection closed by peer", 9.0)
    explained = CollectiveFailed(7, 0, "the script raised", 9.1, is_stall=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    events = [closed, *answers[:answered_before], explained, *answers[answered_before:]]
    ledger, _, commands = play(LEDGER, Running(ABC), *events)
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.failures == 1


def test_a_refused_call_is_told_though_its_consequences_were_heard_first():
    closed = CollectiveFailed(7, 1, "Connection closed by peer", 9.0)
    refused = CollectiveFailed(7, 0, "sizes differ", 9.1, is_refused=True)
    answers = [suspended(rank, 40) for rank in range(3)]
    _, phase, _ = play(LEDGER, Running(ABC), closed, refused, *answers, Tick(12.0))
    assert phase == Finished("failed", "no worker is lost, but sizes differ")


TIMED_OUT = "unbound_buffer.cc:78] Timed out waiting 300000ms for recv operation to complete"
ONE_COMPUTES = [CollectiveFailed(7, 1, TIMED_OUT, 9.0), suspended(1, 40), suspended(2, 40)]
"""w0 is inside a long micro-batch, and cannot answer before it has ended."""
LATER = [Tick(12.0), Tick(312.0), Tick(9e3)]
"""Longer than any phase may take without a usual time."""


def test_who_computes_while_a_collective_fails_is_waited_for_and_the_same_go_on():
    """Whether it hangs is suspicion's to say, by its own usual time."""
    ledger, phase, commands = play(LEDGER, Running(ABC), *ONE_COMPUTES, *LATER)
    assert commands == [Abort(ABC)]
    assert isinstance(phase, Suspending)
    ledger, phase, commands = play(ledger, phase, suspended(0, 40))
    assert commands == [Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.failures == 1


def test_what_was_refused_surfaces_once_who_computes_has_answered():
    refused = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    answers = [suspended(1, 40), suspended(2, 40), *LATER, suspended(0, 40)]
    _, phase, _ = play(LEDGER, Running(ABC), refused, *answers)
    assert phase == Finished("failed", "no worker is lost, but sizes differ")


@pytest.mark.parametrize("cause", ["process_died", "hung"])
def test_who_computes_and_is_lost_after_all_explains_the_failure(cause: str):
    gone = WorkerLost(0, cause, 9e3, 9e3)
    ledger, _, commands = play(LEDGER, Running(ABC), *ONE_COMPUTES, *LATER, gone)
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]
    assert ledger.failures == 1


def test_a_loss_explains_the_failure_though_others_answer_after_it():
    refused = CollectiveFailed(7, 1, "sizes differ", 9.0, is_refused=True)
    events = [refused, suspended(1, 40), *LATER, lost(0, 9e3), suspended(2, 40, at=9e3)]
    ledger, _, commands = play(LEDGER, Running(ABC), *events)
    assert commands == [Abort(ABC), Form(Membership(8, (1, 2)), 40)]
    assert ledger.failures == 1


def test_a_newcomer_whose_source_died_goes_back_and_nobody_is_blamed():
    forming = Forming(ABC, 30.0, joined=some(0))
    ledger, _, commands = play(
        LEDGER,
        forming,
        SyncFailed(2, "source is gone", 5.0),
        suspended(0, 40),
        suspended(1, 40),
        suspended(2, -1),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1)), 40)]
    assert (ledger.standbys, ledger.failures) == (some(2), 0)


def test_a_newcomer_that_cannot_catch_up_after_others_formed_goes_back_to_the_pool():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        SyncFailed(2, "source is gone", 5.0),
        suspended(0, 40),
        suspended(1, 40),
        suspended(2, 39),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1)), 40)]
    assert (ledger.standbys, ledger.failures) == (some(2), 0)


def test_generations_that_never_get_their_state_end_the_run_with_the_reason():
    failed = SyncFailed(2, "nobody holds row 3 of model/w", 5.0)
    ledger, phase, _ = play(replace(LEDGER, in_vain=MAX_IN_VAIN - 1), Forming(ABC, 30.0), failed)
    assert (ledger.in_vain, type(phase)) == (MAX_IN_VAIN, Suspending)
    _, phase, commands = play(ledger, Forming(ABC, 30.0), failed)
    assert commands == [Retire((0, 1, 2))]
    assert phase == Finished(
        "failed",
        f"{MAX_IN_VAIN + 1} generations in a row could not get the state of step 40, the last: "
        "w2: nobody holds row 3 of model/w",
    )
    ledger, _, _ = play(ledger, Running(ABC), Committed(7, 41, 0.1, 6.0))
    assert ledger.in_vain == 0


def test_a_newcomer_that_holds_the_step_counts_as_a_survivor():
    _, _, commands = play(LEDGER, Forming(ABC, 30.0), lost(0), suspended(1, 40), suspended(2, 40))
    assert commands[1] == Form(Membership(8, (1, 2)), 40)


def test_who_is_two_steps_behind_cannot_roll_forward():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        *(lost(2), suspended(0, 40, prepared=True), suspended(1, 42)),
        limits=replace(LIMITS, min_workers=1),
    )
    assert commands == [Abort(ABC), Form(Membership(8, (1,)), 42)]
    assert (ledger.step, ledger.standbys) == (42, some(0))


def test_the_step_falls_by_one_when_only_a_follower_of_the_lost_source_is_left():
    limits = replace(LIMITS, min_workers=1)
    forming = Forming(Membership(7, (0, 1)), 30.0)
    decision = transition(LEDGER, forming, lost(0), limits)
    decision = transition(decision.ledger, decision.phase, suspended(1, 39), limits)
    assert decision.commands[0] == Form(Membership(8, (1,)), 39)
    assert decision.reason.startswith("whoever held step 40 is lost: back to 39; generation 8")


def test_a_generation_that_does_not_form_in_time_gives_up_the_silent():
    forming = Forming(ABC, 30.0, joined=some(0))
    ledger, _, commands = play(
        LEDGER,
        forming,
        Tick(30.0),
        suspended(0, 40, at=30.1),
        suspended(1, 40, at=30.1),
        Tick(33.0),
    )
    assert commands == [Abort(ABC), Retire((2,)), Form(Membership(8, (0, 1)), 40)]
    assert ledger.failures == 1


def test_a_generation_that_did_not_form_although_all_live_is_tried_again_at_a_cost():
    answers = [suspended(rank, 40, at=30.1) for rank in range(3)]
    ledger, _, commands = play(LEDGER, Forming(ABC, 30.0), Tick(30.0), *answers)
    assert commands == [Abort(ABC), Form(Membership(8, (0, 1, 2)), 40)]
    assert ledger.failures == 1


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
