"""A successor controller, decision by decision: what the journal forgot, those who live say."""

from dataclasses import replace
from itertools import permutations

import pytest

from elastic.control.commands import Abort, Finish, Form, Recall, Retire, Spawn
from elastic.control.events import (
    Adopted,
    CollectiveFailed,
    Committed,
    Done,
    Joined,
    Loaded,
    Paused,
    StopRequested,
    Suspended,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.failover import have_all
from elastic.control.standing import Standing
from elastic.control.state import Ending, Finished, Forming, Losses, Running, Suspending, Waiting
from elastic.protocol.membership import Membership
from tests.control.transitions import ABC, LEDGER, LIMITS, play, some

WORKING = tuple(Standing(w, "working", 7, w, 3, 40) for w in range(3))


def test_the_number_of_a_worker_that_nobody_has_heard_of_is_not_given_again():
    limits = replace(LIMITS, max_workers=4)
    ledger, phase, commands = play(
        LEDGER, Running(ABC), Adopted(WORKING, 9.0, newest=4), limits=limits
    )
    assert (phase, commands) == (Running(ABC), [Spawn((5,))])
    assert (ledger.next_worker, ledger.spawned) == (6, some(5))


@pytest.mark.parametrize("kind", ["standby", "syncing", "synced"])
def test_who_was_retired_by_the_controller_that_died_is_retired_again(kind):
    """Its Retire may have been lost with that controller."""
    ledger = replace(LEDGER, next_worker=5, standbys=some(4))
    standings = (*WORKING, Standing(3, kind), Standing(4, "standby"))
    limits = replace(LIMITS, max_workers=3, standby=1)
    ledger, phase, commands = play(ledger, Running(ABC), Adopted(standings, 9.0), limits=limits)
    assert (phase, commands) == (Running(ABC), [Retire((3,))])
    assert ledger.standbys == some(4)


def test_who_was_retired_while_its_process_began_is_retired_when_it_is_there():
    ledger, adopted = replace(LEDGER, next_worker=4), (*WORKING, Standing(3, "starting"))
    ledger, phase, commands = play(ledger, Running(ABC), Adopted(adopted, 9.0))
    assert (commands, ledger.spawned) == ([], some(3))
    ledger, phase, commands = play(ledger, phase, WorkerStarted(3, 10.0))
    assert (phase, commands) == (Running(ABC), [Retire((3,))])


def test_who_left_the_members_and_was_retired_is_retired_again_while_they_work():
    ledger = replace(LEDGER, next_worker=4)
    stood = Standing(3, "stopped", 6, 3, 4, 39)
    ledger, phase, commands = play(ledger, Running(ABC), Adopted((*WORKING, stood), 9.0))
    assert (phase, commands) == (Running(ABC), [Retire((3,))])


def test_who_was_retired_and_alone_holds_the_state_is_needed_once_more():
    """What it holds is worth more than that it was to leave."""
    ledger = replace(LEDGER, next_worker=4)
    stood = Standing(3, "stopped", 6, 3, 4, 40)
    ledger, phase, commands = play(ledger, Running(ABC), Adopted((stood,), 9.0))
    assert isinstance(phase, Suspending)
    assert phase.membership.workers == (3,)
    assert not any(isinstance(command, Retire) for command in commands)


def test_a_run_that_was_to_stop_ends_stopped_if_nobody_holds_its_state():
    """What is on record is what a resume begins with."""
    ledger, phase, _ = play(LEDGER, Running(ABC), StopRequested("SIGINT", 8.0))
    standings = (Standing(3, "standby"), Standing(4, "starting"))
    ledger, phase, commands = play(ledger, phase, Adopted(standings, 9.0))
    assert (phase, commands) == (Finished("stopped", "SIGINT"), [Retire((3, 4))])
    assert (ledger.standbys, ledger.spawned) == (some(), some())


def test_what_takes_all_members_and_the_controller_along_is_not_tried_for_ever():
    limits = replace(LIMITS, min_workers=1, max_workers=1)
    ledger, phase, at = replace(LEDGER, next_worker=1), Running(Membership(7, (0,))), 10.0
    for attempt in range(3):
        worker, generation = attempt + 1, 12 + 5 * attempt
        ledger, phase, _ = play(
            ledger,
            phase,
            *(Adopted((), at), WorkerStarted(worker, at), Loaded(worker, 38, at)),
            *(Joined(generation, 0, 0.0, at), Committed(generation, 39, 0.1, at)),
            Committed(generation, 40, 0.1, at),
            limits=limits,
        )
        if attempt < limits.max_failures:
            assert (ledger.step, ledger.losses.failures, ledger.losses.falls) == (
                40,
                0,
                attempt + 1,
            )
    assert isinstance(phase, Finished)
    assert phase.reason.startswith("3 times since step 40 was committed nobody was left")


def test_a_fall_is_counted_whoever_was_about_to_load_the_state():
    waiting = replace(LEDGER, losses=Losses(failures=3), loading=some(3), next_worker=4)
    ledger, *_ = play(
        waiting,
        Waiting("nobody is left"),
        *(Adopted((), 9.0), WorkerStarted(4, 10.0), Loaded(4, 38, 11.0)),
    )
    assert (ledger.step, ledger.losses.falls) == (38, 1)


def test_a_run_that_has_to_wait_after_an_adoption_begins_to_count_its_newcomers_then():
    ledger = LEDGER.with_losses(stillborn=5)
    for phase, counted in ((Running(ABC), 0), (Waiting("nobody is left"), 5)):
        after, waiting, _ = play(ledger, phase, Adopted((Standing(3, "starting"),), 9.0))
        assert isinstance(waiting, Waiting)
        assert after.losses.stillborn == counted


def test_drains_alone_are_no_fall_whoever_hears_of_their_end():
    leaving = replace(LEDGER, leaving=some(0, 1, 2))
    ledger, *_ = play(
        leaving,
        Running(ABC),
        *(Adopted((), 9.0), WorkerStarted(3, 10.0), Loaded(3, 38, 11.0)),
    )
    assert (ledger.step, ledger.losses.falls) == (38, 0)


def test_more_who_hold_the_state_than_may_be_members_are_not_all_members():
    """Two had followed a member that is lost: they hold the state, too."""
    members = tuple(Standing(w, "stopped", 7, w, 3, 40) for w in (0, 1))
    followers = tuple(Standing(w, "stopped", step=40) for w in (4, 5))
    ledger = replace(LEDGER, leaving=some(1), next_worker=6, synced=some(4, 5))
    ledger, phase, commands = play(ledger, Running(ABC), Adopted((*members, *followers), 9.0))
    assert commands == [Recall(Membership(12, (0, 1, 4, 5)))]
    answers = [Suspended(12, rank, 40, False, False, 9.0) for rank in range(4)]
    for stop in ("", "SIGINT"):
        asked = replace(ledger, stop=stop)
        after, _, commands = play(asked, phase, *answers)
        assert commands == [Form(Membership(13, (0, 4, 5)), 40, then_pause=bool(stop))]
        assert (after.standbys, after.outdated) == (some(1), some(1))


def test_nobody_is_needed_besides_who_holds_the_last_step():
    one = WORKING[:1]
    assert have_all(one, 40, range(3), LIMITS)
    assert not have_all(one, 41, range(3), LIMITS), "a missing one may have committed it alone"
    assert not have_all((Standing(4, "synced", step=40), Standing(5, "standby")), 40, (), LIMITS)
    assert not have_all((), 0, range(3), LIMITS)


def test_of_a_sharded_state_one_part_may_be_missing_if_there_are_copies():
    limits = replace(LIMITS, is_whole=False, has_copies=True)
    assert have_all(WORKING[1:], 40, range(3), limits)
    assert not have_all(WORKING[1:], 40, range(3), replace(limits, has_copies=False))
    assert not have_all(WORKING[:1], 40, range(3), limits)
    assert not have_all(WORKING[:1], 40, (0,), limits), "the journal's end is lost"
    assert not have_all(WORKING[1:], 40, range(4), limits)


# --- who is ahead brings its vote ---------------------------------------------------
AHEAD = (
    Standing(0, "stopped", 7, 0, 3, 41),
    Standing(1, "stopped", 7, 1, 3, 40),
    Standing(2, "stopped", 7, 2, 3, 40),
)


def answer(rank: int, step: int, *, is_prepared: bool = False) -> Suspended:
    return Suspended(12, rank, step, is_prepared, False, 10.0)


def test_a_step_whose_only_owner_dies_without_its_vote_is_done_again():
    together, two = Membership(12, (0, 1, 2)), Membership(13, (1, 2))
    ledger, phase, commands = play(
        LEDGER,
        Running(ABC),
        Adopted(AHEAD, 9.0),
        answer(1, 40, is_prepared=True),
        answer(2, 40, is_prepared=True),
        WorkerLost(0, "process_died", 10.0, 10.1),
    )
    assert commands == [Recall(together), Form(two, 40)]
    assert (ledger.step, phase) == (40, Forming(two, 40.1))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_member_that_is_ahead_brings_the_vote_that_rolls_the_others_forward(order):
    answers = (answer(0, 41), answer(1, 40, is_prepared=True), answer(2, 40, is_prepared=True))
    ledger, _, commands = play(
        LEDGER, Running(ABC), Adopted(AHEAD, 9.0), *(answers[i] for i in order)
    )
    form = Form(Membership(13, (0, 1, 2)), 41, roll_forward=(1, 2), vote_of=0)
    assert commands == [Recall(Membership(12, (0, 1, 2))), form]
    assert ledger.step == 41


def test_a_generation_at_work_is_left_there_and_no_step_is_proven_without_its_vote():
    standings = tuple(replace(s, kind="working") for s in AHEAD)
    ledger, phase, commands = play(LEDGER, Running(ABC), Adopted(standings, 9.0))
    assert (ledger.step, phase, commands) == (40, Running(ABC), [])


def test_who_still_stands_in_an_older_generation_does_not_call_the_one_at_work_back():
    left_out = Standing(0, "working", 7, 0, 3, 40)
    at_work = (Standing(1, "working", 8, 0, 2, 41), Standing(2, "working", 8, 1, 2, 41))
    _, phase, commands = play(LEDGER, Running(ABC), Adopted((left_out, *at_work), 9.0))
    assert phase == Running(Membership(8, (1, 2)))
    assert not [c for c in commands if isinstance(c, Abort | Recall | Form)]


def test_a_member_far_behind_does_not_take_the_others_back():
    standings = (*AHEAD[:2], Standing(2, "stopped", 3, 0, 1, 7))
    ledger, _, _ = play(LEDGER, Running(ABC), Adopted(standings, 9.0))
    assert ledger.step == 40


# --- two generations have done the same step ---------------------------------------------
FOLLOWER = Standing(3, "stopped", step=41, origin=7)
"""It followed a member of generation 7 that is lost, with the step that it alone had committed."""
AGAIN = tuple(Standing(w, "stopped", 8, w - 1, 2, 41, origin=8) for w in (1, 2))
"""They have done it again, without that member: other ranks, so perhaps other bits."""
CALLED = Membership(13, (1, 2, 3))
ONE = replace(LIMITS, min_workers=1)


def stands(
    rank: int,
    step: int,
    origin: int,
    *,
    prepared_by: int = 0,
    between: bool = False,
    copied: bool = False,
) -> Suspended:
    is_prepared = prepared_by > 0
    return Suspended(13, rank, step, is_prepared, between, 10.0, origin, prepared_by, copied)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_who_has_the_step_of_an_older_generation_gets_the_newer_ones(order):
    answers = stands(0, 41, 8), stands(1, 41, 8), stands(2, 41, 7)
    ledger, _, commands = play(
        LEDGER, Running(ABC), Adopted((*AGAIN, FOLLOWER), 9.0), *(answers[i] for i in order)
    )
    assert commands == [Recall(CALLED), Form(Membership(14, (1, 2)), 41, origin=8)]
    assert (ledger.standbys, ledger.outdated) == (some(3), some(3))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_gradients_of_a_generation_do_not_become_the_step_of_another(order):
    """The members were about to do again what the follower has: its vote is not of their sums."""
    before = tuple(replace(s, step=40, origin=7) for s in AGAIN)
    answers = stands(0, 40, 7, prepared_by=8), stands(1, 40, 7, prepared_by=8), stands(2, 41, 7)
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        Adopted((*before, FOLLOWER), 9.0),
        *(answers[i] for i in order),
        limits=ONE,
    )
    assert commands == [Recall(CALLED), Form(Membership(14, (3,)), 41, origin=7)]
    assert (ledger.standbys, ledger.outdated) == (some(1, 2), some(1, 2))


def test_the_gradients_of_the_same_generation_do():
    before = tuple(replace(s, step=40, origin=7) for s in AGAIN)
    answers = stands(0, 40, 7, prepared_by=7), stands(1, 40, 7, prepared_by=7), stands(2, 41, 7)
    _, _, commands = play(LEDGER, Running(ABC), Adopted((*before, FOLLOWER), 9.0), *answers)
    form = Form(Membership(14, (1, 2, 3)), 41, (1, 2), vote_of=3, origin=7)
    assert commands == [Recall(CALLED), form]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_who_followed_a_lost_member_is_no_member_of_those_who_evaluate_after_the_step(order):
    """They would wait for it in the evaluation, and it at the boundary for them."""
    evaluating = tuple(replace(s, origin=7) for s in AGAIN)
    answers = stands(0, 41, 7, between=True), stands(1, 41, 7), stands(2, 41, 7, copied=True)
    ledger, _, commands = play(
        LEDGER, Running(ABC), Adopted((*evaluating, FOLLOWER), 9.0), *(answers[i] for i in order)
    )
    form = Form(Membership(14, (1, 2)), 41, then_pause=True, origin=7)
    assert commands == [Recall(CALLED), form]
    assert (ledger.standbys, ledger.outdated) == (some(3), some(3))


def test_nor_of_those_who_roll_forward_to_the_step_that_it_has():
    before = tuple(replace(s, step=40, origin=7) for s in AGAIN)
    answers = (stands(0, 40, 7, prepared_by=7), stands(1, 40, 7, prepared_by=7))
    _, _, commands = play(
        LEDGER,
        Running(ABC),
        Adopted((*before, FOLLOWER), 9.0),
        *(*answers, stands(2, 41, 7, copied=True)),
    )
    form = Form(Membership(14, (1, 2)), 41, (1, 2), vote_of=None, origin=7)
    assert commands == [Recall(CALLED), form]


def test_nobody_rolls_forward_to_a_step_whose_vote_nobody_has_brought():
    """Its owner has loaded it, from a checkpoint that has no vote."""
    loaded = replace(stands(0, 41, 7), has_vote=False)
    behind = stands(1, 40, 7, prepared_by=7), stands(2, 40, 7, prepared_by=7)
    before = tuple(replace(s, step=40 + (s.worker == 1), origin=7) for s in AGAIN)
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        Adopted((*before, replace(FOLLOWER, step=40)), 9.0),
        *(loaded, *behind),
        limits=ONE,
    )
    assert commands == [Recall(CALLED), Form(Membership(14, (1,)), 41, origin=7)]
    assert ledger.outdated == some(2, 3)


def test_if_all_with_the_newer_state_are_lost_the_older_one_of_the_same_step_counts():
    ledger, _, commands = play(
        LEDGER,
        Running(ABC),
        Adopted((*AGAIN, FOLLOWER), 9.0),
        *(stands(0, 41, 8), stands(2, 41, 7), WorkerLost(1, "process_died", 10.0, 10.1)),
        stands(1, 40, 7),
        limits=ONE,
    )
    assert commands == [Recall(CALLED), Form(Membership(14, (3,)), 41, origin=7)]
    assert (ledger.step, ledger.origin, ledger.outdated) == (41, 7, some(2))


def test_the_final_state_is_that_of_those_who_were_told_to_write_it():
    ended = tuple(replace(s, kind="ended", step=100) for s in AGAIN)
    follower = replace(FOLLOWER, step=100)
    ledger, _, commands = play(LEDGER, Running(ABC), Adopted((*ended, follower), 9.0))
    assert commands == [Finish(Membership(13, (1, 2)), "succeeded")]
    assert ledger.standbys == some(3)


def test_an_older_state_of_the_last_step_does_not_make_up_for_who_is_missing():
    follower = (FOLLOWER,)
    assert have_all(follower, 41, (1, 2), LIMITS, origin=7)
    assert not have_all(follower, 41, (1, 2), LIMITS, origin=8)


def test_a_generation_is_told_whose_step_it_begins_with():
    """Newcomers that followed somebody else may stand at the same one."""
    _, _, commands = play(
        replace(LEDGER, synced=some(3), next_worker=4),
        Running(ABC),
        Committed(7, 41, 0.1, 8.0, origin=7),
        WorkerLost(0, "process_died", 9.0, 9.0),
        *(Suspended(7, rank, 41, False, False, 10.0, 7) for rank in (1, 2)),
    )
    assert commands[-1] == Form(Membership(8, (1, 2, 3)), 41, origin=7)


# --- generations ----------------------------------------------------------------------
def test_the_next_generation_is_above_those_that_workers_without_state_were_told_of():
    newcomer = Standing(3, "syncing", 12, 3, 4, 0)
    ledger, _, commands = play(LEDGER, Running(ABC), Adopted((*WORKING, newcomer), 9.0))
    assert commands == [Recall(Membership(17, (0, 1, 2)))], (
        "12 was to replace 7, 13 to 16 may be lost"
    )
    assert ledger.generation == 17


# --- the end ----------------------------------------------------------------------------
SHARDED = replace(LIMITS, is_whole=False, has_copies=True, can_save=True)
ENDED = tuple(Standing(w, "ended", 7, w, 4, 100) for w in range(4))
FOUR = Membership(7, (0, 1, 2, 3))


@pytest.mark.parametrize("journal", [Ending(FOUR, "succeeded", "", 30.0), Running(FOUR)])
def test_the_rows_of_a_lost_rank_are_put_together_before_the_final_state_is_written(journal):
    """Rank 0 died with the controller: as rank 0 of three, rank 1 would write rows of rank 1."""
    three = (1, 2, 3)
    ledger = replace(LEDGER, step=100)
    ledger, phase, commands = play(
        ledger, journal, Adopted(ENDED[1:], 9.0),
        *(Suspended(12, rank, 100, False, True, 10.0) for rank in range(3)),
        *(Joined(13, rank, 0.1, 11.0, step=100) for rank in range(3)),
        *(Done(13, rank, 100, 12.0) for rank in range(3)),
        limits=SHARDED,
    )  # fmt: skip
    again = Membership(13, three)
    assert commands == [
        Recall(Membership(12, three)),
        Form(again, 100, then_pause=True),
        Finish(again, "succeeded"),
    ]
    assert isinstance(phase, Ending)


def test_a_stopped_sharded_run_ends_as_stopped_although_the_journal_does_not_say_so():
    _, phase, commands = play(
        LEDGER, Running(ABC), Adopted(tuple(replace(s, step=40) for s in ENDED[1:]), 9.0),
        *(Suspended(12, rank, 40, False, False, 10.0) for rank in range(3)),
        *(Joined(13, rank, 0.1, 11.0, step=40) for rank in range(3)),
        *(Paused(13, rank, 40, 12.0) for rank in range(3)),
        limits=SHARDED,
    )  # fmt: skip
    assert commands[-1] == Finish(Membership(13, (1, 2, 3)), "stopped")
    assert isinstance(phase, Ending)


def test_whoever_has_the_whole_final_state_writes_it_under_a_new_rank():
    ledger = replace(LEDGER, step=100)
    three = Membership(12, (1, 2, 3))
    _, phase, commands = play(ledger, Running(FOUR), Adopted(ENDED[1:], 9.0))
    assert commands == [Finish(three, "succeeded")]
    assert phase == Ending(three, "succeeded", "it ended", 39.0)


def test_a_collective_that_fails_at_the_end_of_a_sharded_run_gives_the_generation_up():
    failed = CollectiveFailed(7, 1, "Connection closed by peer", 9.0)
    ending = Ending(ABC, "succeeded", "", 30.0)
    ledger = replace(LEDGER, step=100)
    _, phase, commands = play(ledger, ending, failed, limits=SHARDED)
    assert commands == [Abort(ABC)]
    assert phase == Suspending(ABC, some(), 12.0, "Connection closed by peer")
    assert play(ledger, ending, failed) == (ledger, ending, [])
