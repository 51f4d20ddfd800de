"""Journals of runs that began before a word was replaced: they are read as if it had never been."""

from dataclasses import replace

from elastic.control.detection.patience import Costly, PhaseOfStep
from elastic.control.events import Adopted, WorkerStarted
from elastic.control.replay import JOURNAL_TYPES
from elastic.control.standing import Standing
from elastic.control.state import Ledger, Losses, Save, Saves
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


def test_the_phase_of_a_step_was_a_place():
    costly = Costly(PhaseOfStep(40, "data"), NumberSet.of([1]))
    old = {"type": "Place", "step": 40, "phase": "data"}
    assert decode({**encode(costly), "place": old}, JOURNAL_TYPES) == costly


def test_a_standby_was_ready_and_who_waited_with_the_state_a_holder():
    old = encode(LEDGER)
    old["ready"], old["holders"] = old.pop("standbys"), old.pop("with_state")
    assert decode(old, JOURNAL_TYPES) == decode(encode(LEDGER), JOURNAL_TYPES) == LEDGER


def test_losses_and_saves_were_fields_of_the_ledger():
    save = Save(3, 40, NumberSet.of([0]))
    new = replace(
        LEDGER,
        losses=Losses(failures=2, stillborn=1, respawn_at=4.5, barred=1, barred_until=9.0),
        saves=Saves(save, published_at=1.5, asked_at=2.5, kept_step=40),
    )
    old = encode(new)
    del old["losses"], old["saves"]
    old |= {"failures": 2, "falls": 0, "fallen_from": -1, "in_vain": 0, "stillborn": 1}
    old |= {"respawn_at": 4.5, "barred": 1, "barred_until": 9.0, "costly": []}
    old |= {"save": encode(save), "saved_at": 1.5, "save_asked_at": 2.5, "kept_step": 40}
    assert decode(old, JOURNAL_TYPES) == decode(encode(new), JOURNAL_TYPES) == new


def test_a_standby_introduced_itself_as_ready():
    ready = {"type": "Standing", "worker": 4, "kind": "ready"}
    adopted = {"type": "Adopted", "standings": [ready], "at": 9.0}
    assert decode(adopted, JOURNAL_TYPES) == Adopted((Standing(4, "standby"),), 9.0)


def test_copies_were_slow_without_a_name():
    old = encode(LEDGER) | {"is_copy_slow": True}
    del old["slow_copies"]
    assert decode(old, JOURNAL_TYPES) == LEDGER
