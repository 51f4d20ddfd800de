"""A drain notice, decision by decision."""

from dataclasses import replace

from elastic.control.commands import (
    Abort,
    Discard,
    Form,
    Keep,
    Load,
    Pause,
    Publish,
    Retire,
    Spawn,
    Sync,
)
from elastic.control.events import (
    DrainNotice,
    Joined,
    Kept,
    PartFailed,
    PartSaved,
    Paused,
    Suspended,
    Synced,
    Tick,
    WorkerStarted,
)
from elastic.control.state import Forming, Notice, Pausing, Running, Waiting
from elastic.protocol.membership import Membership
from tests.control.transitions import ABC, LEDGER, LIMITS, lost, play, some, suspended

NOTICE = DrainNotice(0, "drain", deadline=40.0, at=10.0)
ONE = replace(LIMITS, min_workers=1)


def test_the_replacement_is_asked_for_at_once_and_enters_as_the_leaver_leaves():
    ledger, phase, commands = play(
        LEDGER, Running(ABC), NOTICE, WorkerStarted(3, 13.0), Synced(3, 14.0), limits=ONE
    )
    assert commands == [Spawn((3,)), Sync(3, 1), Pause(ABC)]
    ledger, phase, commands = play(
        ledger, phase, *(Paused(7, rank, 44, 15.0) for rank in range(3)), limits=ONE
    )
    new = Membership(8, (1, 2, 3))
    assert commands == [Form(new, 44)]
    assert phase == Forming(new, 45.0, newcomers=some(3))
    assert (ledger.standbys, ledger.leaving) == (some(0), some(0)), (
        "newcomers may still read from it"
    )
    ledger, phase, commands = play(
        ledger, phase, *(Joined(8, rank, 0.0, 16.0) for rank in range(3)), limits=ONE
    )
    assert commands == [Retire((0,))]
    assert phase == Running(new)
    said = (Notice(0, 25.0, 40.0),)
    assert ledger == replace(LEDGER, generation=8, step=44, next_worker=4, notices=said)


def test_who_has_left_comes_back_if_nobody_else_has_its_state_any_more():
    """Of the two that took its place, the one that had caught up is lost: the other is behind."""
    alone, two = Membership(7, (0,)), Membership(8, (1, 2))
    ledger = replace(LEDGER, synced=some(1, 2), next_worker=3)
    ledger, phase, commands = play(
        ledger,
        Running(alone),
        replace(NOTICE, deadline=1000.0),
        Paused(7, 0, 44, 15.0, origin=7),
        limits=ONE,
    )
    assert commands == [Pause(alone), Spawn((3,)), Form(two, 44, origin=7)]
    assert (ledger.standbys, ledger.left) == (some(0), some(0))
    behind = Suspended(8, 1, 43, False, False, 16.1, origin=7, is_copied=True)
    ledger, phase, commands = play(ledger, phase, lost(1, at=16.0), behind, limits=ONE)
    assert commands == [Abort(two), Form(Membership(9, (0,)), 44, origin=7)]
    assert (ledger.step, ledger.standbys, ledger.left) == (44, some(2), some())
    ledger, phase, _ = play(ledger, phase, Joined(9, 0, 0.0, 17.0), limits=ONE)
    assert phase == Running(Membership(9, (0,)))


def test_without_a_replacement_it_leaves_after_half_of_the_notice():
    ledger, phase, commands = play(LEDGER, Running(ABC), NOTICE, Tick(24.9), limits=ONE)
    assert (phase, commands) == (Running(ABC), [Spawn((3,))])
    ledger, phase, commands = play(ledger, phase, Tick(25.0), limits=ONE)
    assert (phase, commands) == (Pausing(ABC), [Pause(ABC)])
    _, _, commands = play(
        ledger, phase, *(Paused(7, rank, 44, 26.0) for rank in range(3)), limits=ONE
    )
    assert commands == [Form(Membership(8, (1, 2)), 44)]


def test_two_notices_are_one_regroup():
    second = replace(NOTICE, worker=2, deadline=20.0, at=11.0)
    ledger, phase, commands = play(LEDGER, Running(ABC), NOTICE, second, Tick(15.5), limits=ONE)
    assert commands == [Spawn((3,)), Spawn((4,)), Pause(ABC)]
    _, _, commands = play(
        ledger, phase, *(Paused(7, rank, 44, 16.0) for rank in range(3)), limits=ONE
    )
    assert commands == [Form(Membership(8, (1,)), 44)]


def test_a_shorter_notice_counts_and_a_longer_one_does_not():
    sigterm = replace(NOTICE, deadline=21.0, at=11.0)
    later = replace(NOTICE, deadline=99.0, at=12.0)
    _, phase, commands = play(LEDGER, Running(ABC), NOTICE, sigterm, later, Tick(16.0), limits=ONE)
    assert (phase, commands) == (Pausing(ABC), [Spawn((3,)), Pause(ABC)])


def test_a_deadline_goes_with_its_worker_and_hurries_no_other():
    limits = replace(LIMITS, min_workers=3, max_failures=0, is_whole=False, can_save=True)
    early = replace(NOTICE, worker=2, deadline=14.0)
    late = replace(NOTICE, deadline=153.0, at=13.0)
    ledger, phase, _ = play(
        LEDGER,
        Running(ABC),
        *(early, late, lost(2, 14.5), suspended(0, 40, at=14.6), suspended(1, 40, at=14.6)),
        *(WorkerStarted(3, 15.0), Synced(3, 15.5)),
        limits=limits,
    )
    three = Membership(8, (0, 1, 3))
    assert phase == Forming(three, 45.5, newcomers=some(3))
    joined = (Joined(8, rank, 0.0, 16.0, 40) for rank in range(3))
    ledger, phase, commands = play(ledger, phase, *joined, Tick(82.5), limits=limits)
    assert (phase, commands) == (Running(three), []), "half of its 140 s is left"
    paused = (Paused(8, rank, 44, 84.0) for rank in range(3))
    ledger, phase, commands = play(ledger, phase, Tick(83.0), *paused, limits=limits)
    assert commands == [Pause(three), Keep(three)], "there is time to save its shard"
    assert play(ledger, phase, Tick(152.9), limits=limits) == (ledger, phase, [])


def test_of_a_state_in_parts_who_survives_a_loss_leaves_at_the_next_boundary():
    """What the lost one held may be nobody else's."""
    limits = replace(ONE, is_whole=False, has_copies=True)
    broken = (lost(2, 14.5), suspended(0, 40, at=14.6), suspended(1, 40, at=14.6))
    ledger, phase, commands = play(LEDGER, Running(ABC), NOTICE, *broken, limits=limits)
    two = Membership(8, (0, 1))
    assert commands[-1] == Form(two, 40)
    joined = (Joined(8, rank, 0.0, 16.0, 40) for rank in range(2))
    ledger, phase, commands = play(ledger, phase, *joined, Tick(25.0), limits=limits)
    assert (phase, commands) == (Pausing(two), [Pause(two)])
    paused = (Paused(8, rank, 44, 26.0) for rank in range(2))
    assert Form(Membership(9, (1,)), 44) in play(ledger, phase, *paused, limits=limits)[2]


def test_who_has_outlived_its_notice_is_not_relied_on_after_a_loss():
    """Of a whole state everybody has all."""
    broken = (lost(2, 40.5), suspended(0, 40, at=40.6), suspended(1, 40, at=40.6))
    _, _, commands = play(LEDGER, Running(ABC), NOTICE, *broken, limits=ONE)
    assert commands[-1] == Form(Membership(8, (1,)), 40)


def test_of_a_state_in_parts_who_has_outlived_its_notice_gives_what_it_holds():
    """It is still up, and may be the only one that has it; then it leaves at once."""
    limits = replace(ONE, is_whole=False, has_copies=True)
    broken = (lost(2, 40.5), suspended(0, 40, at=40.6), suspended(1, 40, at=40.6))
    ledger, phase, commands = play(LEDGER, Running(ABC), NOTICE, *broken, limits=limits)
    two = Membership(8, (0, 1))
    assert commands[-1] == Form(two, 40)
    joined = (Joined(8, rank, 0.0, 41.0, 40) for rank in range(2))
    ledger, phase, commands = play(ledger, phase, *joined, limits=limits)
    assert (phase, commands) == (Pausing(two), [Pause(two)])
    paused = (Paused(8, rank, 41, 42.0) for rank in range(2))
    assert Form(Membership(9, (1,)), 41) in play(ledger, phase, *paused, limits=limits)[2]


def test_who_has_outlived_its_notice_and_goes_while_it_gives_is_lost_as_any_other():
    """But it had said so: that is no failure."""
    limits = replace(ONE, is_whole=False, has_copies=True, max_failures=1)
    broken = (lost(2, 40.5), suspended(0, 40, at=40.6), suspended(1, 40, at=40.6))
    gone = (lost(0, 41.0), Suspended(8, 1, 40, False, False, 41.1))
    ledger, _, commands = play(LEDGER, Running(ABC), NOTICE, *broken, *gone, limits=limits)
    one = Membership(9, (1,))
    assert commands[-2:] == [Abort(Membership(8, (0, 1))), Form(one, 40)]
    assert (ledger.losses.failures, ledger.leaving) == (1, some())


def test_whom_the_minimum_needs_trains_on_until_it_is_gone_which_is_no_failure():
    limits = replace(LIMITS, min_workers=3, max_failures=0)
    ledger, phase, commands = play(LEDGER, Running(ABC), NOTICE, Tick(39.0), limits=limits)
    assert (phase, commands) == (Running(ABC), [Spawn((3,))])
    ledger, phase, _ = play(ledger, phase, lost(0, 40.0), limits=limits)
    assert (ledger.losses.failures, ledger.leaving) == (0, some())


def test_a_newcomer_for_whom_there_is_no_room_yet_does_not_pause_the_others():
    """With two to leave and `min` needing both, the first of their replacements waits for the
    second: a pause would form the same generation again, for ever."""
    limits = replace(LIMITS, min_workers=3, max_workers=3)
    second = replace(NOTICE, worker=2)
    events = (NOTICE, second, WorkerStarted(3, 13.0), Synced(3, 14.0), Tick(14.2))
    ledger, phase, commands = play(LEDGER, Running(ABC), *events, limits=limits)
    assert phase == Running(ABC)
    assert Pause(ABC) not in commands
    events = (WorkerStarted(4, 15.0), Synced(4, 15.5), *(Paused(7, r, 44, 16.0) for r in range(3)))
    _, phase, commands = play(ledger, phase, *events, limits=limits)
    assert commands[-1] == Form(Membership(8, (1, 3, 4)), 44)


def test_everybody_may_leave_if_the_replacements_are_enough():
    limits = replace(LIMITS, min_workers=1, max_workers=1)
    alone = Membership(7, (0,))
    _, phase, commands = play(
        LEDGER,
        Running(alone),
        NOTICE,
        WorkerStarted(3, 13.0),
        Synced(3, 14.0),
        Paused(7, 0, 44, 15.0),
        Joined(8, 0, 0.0, 16.0),
        limits=limits,
    )
    new = Membership(8, (3,))
    assert commands == [Spawn((3,)), Sync(3, 0), Pause(alone), Form(new, 44), Retire((0,))]
    assert phase == Running(new)


def test_a_standby_with_a_notice_is_replaced_at_once():
    ledger = replace(LEDGER, standbys=some(3), next_worker=4)
    limits = replace(LIMITS, standby=1)
    notice = replace(NOTICE, worker=3)
    ledger, _, commands = play(ledger, Running(ABC), notice, limits=limits)
    assert commands == [Retire((3,)), Spawn((4,))]
    assert ledger.leaving == some()


def test_the_only_one_with_the_state_is_kept_whatever_its_notice_says():
    ledger = replace(LEDGER, with_state=some(0), next_worker=4, spawned=some(1, 2))
    ledger, phase, commands = play(ledger, Waiting("few"), NOTICE, Tick(30.0))
    assert isinstance(phase, Waiting)
    assert commands == [Spawn((4,))]
    assert (ledger.with_state, ledger.leaving) == (some(0), some(0))


def test_a_notice_said_twice_or_by_a_stranger_is_no_news():
    ledger, phase, _ = play(LEDGER, Running(ABC), NOTICE, limits=ONE)
    assert play(ledger, phase, NOTICE, limits=ONE) == (ledger, phase, [])
    stranger = replace(NOTICE, worker=77)
    assert play(LEDGER, Running(ABC), stranger) == (LEDGER, Running(ABC), [])


def test_a_state_that_only_leavers_hold_is_saved_and_they_go_no_further():
    limits = replace(LIMITS, min_workers=1, max_workers=1, can_save=True)
    alone = Membership(7, (0,))
    ledger, phase, commands = play(
        LEDGER,
        Running(alone),
        NOTICE,
        Tick(25.0),
        Paused(7, 0, 44, 26.0),
        PartSaved(7, 0, 44, 27.0),
        Kept(7, 0, 27.0),
        Tick(28.0),
        limits=limits,
    )
    assert commands == [Spawn((3,)), Pause(alone), Keep(alone), Publish(7, 44)]
    assert isinstance(phase, Waiting)
    assert ledger.with_state == some(0)
    _, _, synced = play(ledger, phase, WorkerStarted(3, 29.0), Synced(3, 30.0), limits=limits)
    assert synced == [Sync(3, 0), Form(Membership(8, (3,)), 44)], "it came in time"
    ledger, phase, late = play(ledger, phase, lost(0, 40.0), WorkerStarted(3, 41.0), limits=limits)
    assert (late, ledger.losses.failures) == ([Load(3)], 0), "it takes the state that was saved"


def test_a_shard_is_saved_before_its_holder_leaves():
    limits = replace(ONE, is_whole=False, can_save=True)
    ledger, phase, commands = play(
        LEDGER,
        Running(ABC),
        NOTICE,
        Tick(25.0),
        *(Paused(7, rank, 44, 26.0) for rank in range(3)),
        *(Kept(7, rank, 27.0) for rank in range(3)),
        limits=limits,
    )
    new = Membership(8, (1, 2))
    assert commands == [Spawn((3,)), Pause(ABC), Keep(ABC), Form(new, 44)]
    assert (phase, ledger.saves.kept_step) == (Forming(new, 57.0), 44)


ALL = tuple(replace(NOTICE, worker=w, at=10.0 + w) for w in range(3))
SAVES = replace(LIMITS, can_save=True)
ASKED = (*ALL, Tick(25.0), *(Paused(7, rank, 44, 26.0) for rank in range(3)))


def test_a_state_counts_as_saved_only_once_all_of_it_is():
    ledger, phase, commands = play(LEDGER, Running(ABC), *ASKED, limits=SAVES)
    assert (commands[-1], ledger.saves.kept_step) == (Keep(ABC), -1)
    ledger, phase, commands = play(
        ledger,
        phase,
        PartSaved(7, 0, 44, 27.0),
        Kept(7, 0, 27.0),
        lost(2, 28.0),
        *(suspended(rank, 44, at=28.0) for rank in (0, 1)),
        limits=SAVES,
    )
    two = Membership(8, (0, 1))
    assert commands == [Abort(ABC), Discard(7, 44), Form(two, 44)], "they go on, and try again"
    assert (phase, ledger.saves.kept_step) == (Forming(two, 58.0), -1)


def test_a_part_that_could_not_be_saved_is_no_saved_state():
    kept = [Kept(7, rank, 27.0) for rank in range(3)]
    ledger, _, commands = play(
        LEDGER, Running(ABC), *ASKED, PartFailed(7, 1, 44, "full", 26.5), *kept, limits=SAVES
    )
    assert commands[-2:] == [Discard(7, 44), Form(Membership(8, (0, 1, 2)), 44)]
    assert ledger.saves.kept_step == -1


def test_nobody_waits_for_a_save_longer_than_the_notice():
    ledger, phase, _ = play(LEDGER, Running(ABC), *ASKED, Kept(7, 0, 27.0), limits=SAVES)
    waiting = play(ledger, phase, Tick(39.9), limits=SAVES)
    assert waiting == (ledger, phase, [])
    ledger, phase, commands = play(ledger, phase, Tick(40.0), limits=SAVES)
    same = Membership(8, (0, 1, 2))
    assert commands == [Form(same, 44)]
    joined = [Joined(8, rank, 0.0, 41.0) for rank in range(3)]
    ledger, phase, commands = play(ledger, phase, *joined, Tick(42.0), limits=SAVES)
    assert (phase, commands) == (Running(same), []), "it is not tried again"
