"""The controller's loop over a fake cluster, and the journal it leaves behind."""

import asyncio
from dataclasses import replace

import pytest

from elastic.control.commands import Command
from elastic.control.events import Event
from elastic.control.replay import (
    JOURNAL_TYPES,
    Entry,
    Started,
    is_news,
    replay,
)
from elastic.control.state import Decision, Finished, Limits
from elastic.controller.loop import control
from elastic.protocol.encoding import dumps, loads
from tests.control.fake_cluster import FakeCluster
from tests.control.faults import Faults

LIMITS = Limits(
    min_workers=2,
    max_workers=3,
    standby=0,
    steps=10,
    max_failures=8,
    join_timeout_s=30,
    end_timeout_s=30,
    confirm_timeout_s=3,
)


class AsyncCluster:
    def __init__(self, fake: FakeCluster) -> None:
        self.fake = fake

    async def execute(self, command: Command) -> None:
        self.fake.execute(command)

    async def next_event(self) -> Event:
        return self.fake.next_event()


def run(seed: int) -> tuple[Finished, list[str], FakeCluster]:
    fake = FakeCluster(seed, LIMITS.steps, Faults(kills=seed % 5))
    journal: list[str] = []

    def record(event: Event | None, decision: Decision) -> None:
        commands, reason = decision.commands, decision.reason
        if event is None:
            journal.append(dumps(Started(LIMITS, 0.0, commands, reason)))
        elif is_news(event, decision):
            is_due = len(journal) % 10 == 0
            ledger, phase = (decision.ledger, decision.phase) if is_due else (None, None)
            journal.append(dumps(Entry(event, commands, reason, ledger, phase)))

    return asyncio.run(control(AsyncCluster(fake), LIMITS, record, 0.0)), journal, fake


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_read_from_its_lines_replays_to_the_same_decisions(seed: int):
    finished, journal, fake = run(seed)
    assert finished.outcome == "succeeded"
    entries = [loads(line, JOURNAL_TYPES) for line in journal]
    assert list(replay(entries)) == []
    assert [c for e in entries for c in e.commands] == fake.trace


def test_replay_says_what_would_be_decided_otherwise():
    _, journal, _ = run(1)
    entries = [loads(line, JOURNAL_TYPES) for line in journal]
    index = next(i for i, e in enumerate(entries) if i and e.commands)
    entries[index] = replace(entries[index], commands=())
    (mismatch,) = replay(entries)
    assert (mismatch.index, mismatch.event) == (index, entries[index].event)
    assert str(mismatch).startswith(f"entry {index}, ")


def test_a_journal_without_its_beginning_cannot_be_replayed():
    _, journal, _ = run(1)
    with pytest.raises(ValueError, match="does not begin with its limits"):
        list(replay(loads(line, JOURNAL_TYPES) for line in journal[1:]))
