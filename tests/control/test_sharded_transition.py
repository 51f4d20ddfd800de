"""What the controller decides otherwise where each member holds a part of the state only."""

from dataclasses import replace

import pytest

from elastic.control.commands import Abort, Discard, Finish, Form, Publish, Retire, Spawn
from elastic.control.events import (
    CollectiveFailed,
    Committed,
    Connected,
    Done,
    Ended,
    Event,
    Joined,
    PartSaved,
    Paused,
    Suspended,
    Synced,
    Tick,
    WorkerLost,
    WorkerStarted,
)
from elastic.control.state import Ending, Forming, Ledger, Pausing, Running, Save, Suspending
from elastic.protocol.membership import Membership, NumberSet
from tests.control.transitions import LIMITS, play

SHARDED = replace(LIMITS, is_whole=False)
ABC = Membership(7, (0, 1, 2))
AB = Membership(8, (0, 1))


def some(*numbers):
    return NumberSet.of(numbers)


def told(ledger, phase, *events):
    return play(ledger, phase, *events, limits=SHARDED)


def test_survivors_one_step_apart_form_at_the_higher_and_say_where_they_begin():
    ledger = Ledger(generation=7, step=40, next_worker=3)
    events = [
        WorkerLost(2, "process_died", 1.0, 1.0),
        Suspended(7, 0, 41, False, False, 1.1),
        Committed(7, 40, 0.1, 1.1),
        Suspended(7, 1, 40, True, False, 1.2),
    ]
    ledger, phase, commands = told(ledger, Running(ABC), *events)
    assert commands == [Abort(ABC), Form(AB, 41)]
    ledger, phase, commands = told(ledger, phase, Joined(8, 1, 0.1, 1.3, 40))
    assert (ledger.step, phase, commands) == (40, Forming(AB, 31.2, joined=some(1)), [])


def test_a_checkpoint_of_a_step_that_survivors_hold_is_published_once_it_is_on_record():
    """Until then they may go back behind it, and a resume would begin with what never counted."""
    ledger = Ledger(generation=7, step=40, next_worker=3)
    parts = [PartSaved(7, rank, 41, 1.0) for rank in (0, 2)]
    lost = WorkerLost(2, "process_died", 1.1, 1.1)
    events = [*parts, lost, Suspended(7, 0, 41, False, False, 1.2), PartSaved(7, 1, 41, 1.3)]
    ledger, phase, commands = told(ledger, Running(ABC), *events)
    assert commands == [Abort(ABC)]
    assert (ledger.step, ledger.recorded_step) == (41, 40)
    after, _, commands = told(ledger, phase, Committed(7, 41, 0.1, 1.4))
    assert (after.recorded_step, commands) == (41, [Publish(7, 41)])
    _, _, commands = told(ledger, phase, Suspended(7, 1, 40, False, False, 1.4))
    assert commands == [Discard(7, 41), Form(AB, 41)]


MET = [Connected(7, rank, 1.0) for rank in range(3)]


def test_members_that_have_met_may_take_as_long_for_their_state_as_it_is_large():
    ledger, forming = Ledger(generation=7, step=40, next_worker=3), Forming(ABC, 30.0)
    ledger, phase, commands = told(ledger, forming, *MET, Joined(7, 1, 9.0, 10.0, 40), Tick(9e3))
    assert (phase, commands) == (replace(forming, joined=some(1), connected=some(0, 2)), [])
    last = [Joined(7, 0, 9e3, 9e3, 40), Joined(7, 2, 9e3, 9e3, 40)]
    assert told(ledger, phase, *last)[1:] == (Running(ABC), [])


def test_a_member_that_does_not_meet_the_others_in_time_is_missed():
    ledger, forming = Ledger(generation=7, step=40, next_worker=3), Forming(ABC, 30.0)
    ledger, phase, commands = told(ledger, forming, *MET[:2], Tick(30.0))
    why = "generation 7: 1 of 3 workers had not joined after 30 s"
    assert phase == Suspending(ABC, some(), 33.0, why, was_forming=True, apart=some(2))
    assert commands == [Abort(ABC)]


RESET = [CollectiveFailed(7, 0, "reset", 50.0), Suspended(7, 0, 40, False, False, 50.1)]


@pytest.mark.parametrize("events", [[*MET, *RESET], [MET[0], *RESET, *MET[1:]]])
def test_a_round_that_fails_costs_nobody_who_is_inside_a_piece_of_its_state(events: list[Event]):
    """A piece obeys no abort before its end: a request to a store that is slow, an init."""
    ledger, forming = Ledger(generation=7, step=40, next_worker=3), Forming(ABC, 30.0)
    ledger, phase, commands = told(ledger, forming, *events, Tick(53.0), Tick(999.0))
    assert commands == [Abort(ABC)]
    answers = [Suspended(7, rank, 40, False, False, 1000.0) for rank in (1, 2)]
    ledger, phase, commands = told(ledger, phase, *answers)
    assert (phase, commands) == (
        Forming(again := Membership(8, ABC.workers), 1030.0),
        [Form(again, 40)],
    )
    assert ledger.losses.failures == 1


def test_of_those_who_do_not_answer_only_who_had_not_met_the_others_is_given_up():
    """A member that is through may compute for long while another one never arrives."""
    ledger, forming = Ledger(generation=7, step=40, next_worker=3), Forming(ABC, 30.0)
    answer = Suspended(7, 0, 40, False, False, 30.1)
    ledger, phase, commands = told(ledger, forming, *MET[:2], Tick(30.0), answer, Tick(33.0))
    assert commands == [Abort(ABC), Retire((2,))]
    commands = told(ledger, phase, Suspended(7, 1, 40, False, False, 50.0))[2]
    assert commands == [Form(AB, 40)]


def test_a_loss_while_members_get_their_state_regroups_the_others_at_once():
    ledger, forming = Ledger(generation=7, step=40, next_worker=3), Forming(ABC, 30.0)
    died = WorkerLost(2, "process_died", 500.0, 500.0)
    answers = [Suspended(7, rank, 40, False, False, 500.1) for rank in (0, 1)]
    ledger, phase, commands = told(ledger, forming, *MET, died, *answers)
    assert (phase, commands) == (Forming(AB, 530.1), [Abort(ABC), Form(AB, 40)])


def test_newcomers_that_have_no_memory_for_their_part_are_replaced_ever_later():
    """The others go on: only those who arrive are too small."""
    ledger = Ledger(generation=7, step=40, next_worker=3, synced=some(2))
    paused = [Paused(7, rank, 40, 1.0) for rank in (0, 1)]
    ledger, phase, _ = told(ledger, Pausing(Membership(7, (0, 1))), *paused)
    assert phase == Forming(Membership(8, (0, 1, 2)), 31.0, newcomers=some(2))
    for newcomer, generation, at, spawns_at in ((2, 8, 10.0, 11.0), (3, 10, 20.0, 22.0)):
        answers = [Suspended(generation, rank, 40, False, False, at) for rank in (0, 1)]
        alone = [Joined(generation + 1, rank, 0.1, at, 40) for rank in (0, 1)]
        steps = [Committed(generation + 1, 40 + generation, 0.1, at)]
        died = WorkerLost(newcomer, "process_died", at, at, "out of memory")
        ledger, phase, _ = told(ledger, phase, died, *answers, *alone, *steps)
        assert told(ledger, phase, Tick(spawns_at - 0.1))[2] == []
        ledger, phase, commands = told(ledger, phase, Tick(spawns_at))
        assert commands == [Spawn((newcomer + 1,))]
        assert (ledger.losses.failures, isinstance(phase, Running)) == (0, True)
        started = [WorkerStarted(newcomer + 1, at), Synced(newcomer + 1, at)]
        paused = [Paused(generation + 1, rank, 40 + generation, at) for rank in (0, 1)]
        ledger, phase, _ = told(ledger, phase, *started, *paused)
        assert phase.newcomers == some(newcomer + 1)
    joined = [Joined(12, rank, 0.1, 30.0, 50) for rank in range(3)]
    assert told(ledger, phase, *joined)[0].losses.stillborn == 0


def test_a_checkpoint_is_published_once_its_step_is_committed():
    ledger = Ledger(generation=7, step=40, next_worker=3)
    parts = [PartSaved(7, rank, 41, 1.0) for rank in range(3)]
    ledger, phase, commands = told(ledger, Running(ABC), *parts)
    assert commands == []
    ledger, phase, commands = told(ledger, phase, Committed(7, 41, 0.1, 1.1))
    assert (ledger.saves.current, commands) == (Save(), [Publish(7, 41)])


def test_a_member_lost_at_the_end_is_replaced_by_its_copy_and_the_others_end_again():
    ledger = Ledger(generation=7, step=100, next_worker=3)
    events = [
        Ended(7, 0, "ab", 1.0),
        WorkerLost(2, "process_died", 1.0, 1.1),
        Ended(7, 1, "ab", 1.1),
        Suspended(7, 0, 100, False, False, 1.2),
        Suspended(7, 1, 100, False, False, 1.3),
    ]
    ending = Ending(ABC, "succeeded", "the training loop has returned after step 100", 30.0)
    ledger, phase, commands = told(ledger, ending, *events)
    assert commands == [Abort(ABC), Form(AB, 100)]
    again = [Joined(8, 0, 0.1, 1.4, 100), Joined(8, 1, 0.1, 1.4, 100)]
    done = [Done(8, 0, 100, 1.5), Done(8, 1, 100, 1.5)]
    assert told(ledger, phase, *again, *done)[2] == [Finish(AB, "succeeded")]
