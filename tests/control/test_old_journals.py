"""Journals of runs that began before a word was replaced: they are read as if it had never been."""

from elastic.control.events import Adopted, WorkerStarted
from elastic.control.replay import JOURNAL_TYPES
from elastic.control.standing import Standing
from elastic.control.state import Ledger
from elastic.protocol.encoding import decode, encode
from elastic.protocol.membership import NumberSet

LEDGER = Ledger(
    generation=3,
    step=40,
    standbys=NumberSet.of([4]),
    with_state=NumberSet.of([0, 1]),
    behind=NumberSet.of([1]),
)


def test_a_worker_that_had_started_was_ready():
    ready = {"type": "WorkerReady", "worker": 2, "at": 1.5}
    assert decode(ready, JOURNAL_TYPES) == WorkerStarted(2, 1.5)


def test_a_standby_was_ready_and_who_waited_with_the_state_a_holder():
    old = encode(LEDGER)
    old["ready"], old["holders"] = old.pop("standbys"), old.pop("with_state")
    assert decode(old, JOURNAL_TYPES) == decode(encode(LEDGER), JOURNAL_TYPES) == LEDGER


def test_a_standby_introduced_itself_as_ready():
    ready = {"type": "Standing", "worker": 4, "kind": "ready"}
    adopted = {"type": "Adopted", "standings": [ready], "at": 9.0}
    assert decode(adopted, JOURNAL_TYPES) == Adopted((Standing(4, "standby"),), 9.0)
