"""A successor controller, decision by decision: what the journal forgot, those who live say."""

from dataclasses import replace

from elastic.control.adoption import have_all
from elastic.control.commands import Spawn
from elastic.control.events import Adopted
from elastic.control.standing import Standing
from elastic.control.state import Running
from tests.control.test_transition import ABC, LEDGER, LIMITS, play, some

WORKING = tuple(Standing(w, "working", 7, w, 3, 40) for w in range(3))


def test_the_number_of_a_worker_that_nobody_has_heard_of_is_not_given_again():
    limits = replace(LIMITS, max_workers=4)
    ledger, phase, commands = play(
        LEDGER, Running(ABC), Adopted(WORKING, 9.0, newest=4), limits=limits
    )
    assert (phase, commands) == (Running(ABC), [Spawn((5,))])
    assert (ledger.next_worker, ledger.spawned) == (6, some(5))


def test_nobody_is_needed_besides_who_holds_the_last_step():
    one = WORKING[:1]
    assert have_all(one, 40, range(3), LIMITS)
    assert not have_all(one, 41, range(3), LIMITS), "a missing one may have committed it alone"
    assert not have_all((Standing(4, "synced", step=40), Standing(5, "ready")), 40, (), LIMITS)
    assert not have_all((), 0, range(3), LIMITS)


def test_of_a_sharded_state_one_part_may_be_missing_if_there_are_copies():
    limits = replace(LIMITS, is_sharded=True, has_copies=True)
    assert have_all(WORKING[1:], 40, range(3), limits)
    assert not have_all(WORKING[1:], 40, range(3), replace(limits, has_copies=False))
    assert not have_all(WORKING[:1], 40, range(3), limits)
    assert not have_all(WORKING[:1], 40, (0,), limits), "the journal's end is lost"
    assert not have_all(WORKING[1:], 40, range(4), limits)
