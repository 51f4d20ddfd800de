"""A successor controller, decision by decision: what the journal forgot, those who live say."""

from dataclasses import replace

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
