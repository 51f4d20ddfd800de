"""Values of the vocabulary as JSON and back."""

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control import events, state
from elastic.control.commands import Form, Spawn
from elastic.control.events import Suspended
from elastic.control.replay import JOURNAL_TYPES, Entry
from elastic.control.state import Ledger, Waiting
from elastic.protocol.encoding import UndecodableValue, decode, dumps, encode, loads
from elastic.protocol.membership import Membership, NumberSet


def test_a_command_reads_well():
    form = Form(Membership(5, (0, 2)), 40, roll_forward=(2,), vote_of=0)
    assert encode(form) == {
        "type": "Form",
        "membership": {"type": "Membership", "generation": 5, "workers": [0, 2]},
        "step": 40,
        "roll_forward": [2],
        "vote_of": 0,
        "then_pause": False,
        "order": [],
        "origin": 0,
    }
    assert decode(encode(form), JOURNAL_TYPES) == form
    of_before = {key: value for key, value in encode(form).items() if key != "order"}
    assert decode(of_before, JOURNAL_TYPES) == form, "nobody planned a mesh then"


def test_a_set_is_its_ranges():
    numbers = NumberSet.of([*range(3, 90_000), 100_000])
    assert encode(numbers) == {"type": "NumberSet", "ranges": [[3, 89_999], [100_000, 100_000]]}
    assert loads(dumps(numbers), {}) == numbers


@given(
    st.builds(
        Ledger,
        losses=st.builds(state.Losses, respawn_at=st.floats(allow_nan=False)),
        standbys=st.builds(NumberSet.of, st.lists(st.integers(0, 300))),
    )
)
def test_ledgers_come_back_exactly(ledger: Ledger):
    assert loads(dumps(ledger), JOURNAL_TYPES) == ledger


@pytest.mark.parametrize("kind", [*get_args(events.Event), *get_args(state.Command)])
def test_every_event_and_command_is_known(kind: type):
    assert JOURNAL_TYPES[kind.__name__] is kind


def test_an_entry_with_everything_comes_back():
    event = Suspended(3, 1, 40, True, False, 1234567.125)
    entry = Entry(event, (Spawn((1, 2)),), "why", Ledger(3), Waiting("few"))
    assert loads(dumps(entry), JOURNAL_TYPES) == entry


@pytest.mark.parametrize(
    "text",
    ['{"type": "Nonsense"}', '{"step": 3}', '{"type": "Tick"}', '{"type": "Tick", "when": 3}'],
)
def test_what_is_none_of_ours_is_refused(text: str):
    with pytest.raises(UndecodableValue):
        decode(json.loads(text), JOURNAL_TYPES)


def test_what_json_cannot_carry_exactly_is_refused():
    with pytest.raises(TypeError, match="set has no JSON encoding"):
        encode({1, 2})
