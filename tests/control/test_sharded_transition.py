"""What the controller decides otherwise where each member holds a part of the state only."""

from dataclasses import replace

from elastic.control.commands import Abort, Finish, Form, Publish
from elastic.control.events import Committed, Done, Ended, Joined, PartSaved, Suspended, WorkerLost
from elastic.control.state import Ending, Forming, Ledger, Running, Save
from elastic.protocol.membership import Membership, NumberSet
from tests.control.test_transition import LIMITS, play

SHARDED = replace(LIMITS, is_sharded=True)
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


def test_a_checkpoint_is_published_once_its_step_is_committed():
    ledger = Ledger(generation=7, step=40, next_worker=3)
    parts = [PartSaved(7, rank, 41, 1.0) for rank in range(3)]
    ledger, phase, commands = told(ledger, Running(ABC), *parts)
    assert commands == []
    ledger, phase, commands = told(ledger, phase, Committed(7, 41, 0.1, 1.1))
    assert (ledger.save, commands) == (Save(), [Publish(7, 41)])


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
