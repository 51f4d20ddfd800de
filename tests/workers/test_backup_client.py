"""One rank's side of peer memory, with holders in the same process."""

import math
import threading
import time
from dataclasses import asdict, replace

import pytest

from elastic.protocol.messages.to_controller import HolderSilent, Protected
from elastic.protocol.timeouts import timeouts_of
from tests.workers.frozen import FrozenHolder
from tests.workers.places import Place
from tests.workers.sharded_rig import build, enter, spec, train
from workers.backup import client
from workers.backup.client import BackupClient
from workers.backup.server import BackupServer
from workers.distributed.process_group import Alone

NEVER = lambda: False  # noqa: E731
DETECT_S = 3.0


class Kept:
    """A replica of one rank, kept in the first of two holders."""

    def __init__(self, holders, every):
        self.said = []
        config = replace(spec("fsdp"), snapshot_every=every, detect_s=DETECT_S)
        self.backup_client = BackupClient(config, self.said.append)
        self.strategy = build("fsdp", open_backup=lambda: self.backup_client)
        self.backup_client.hear([[f"node{i}", *h.address] for i, h in enumerate(holders)])
        enter(self.strategy, Alone(), 0, generation=1)
        self.begin(1)

    def begin(self, generation, is_held=False):
        self.place = Place(generation)
        self.backup_client.begin(self.strategy.train_state, 1, self.place, is_held=is_held)

    def step(self):
        self.backup_client.wait(NEVER)
        after = lambda state: self.backup_client.after_step(state, self.place)  # noqa: E731
        train(self.strategy, Alone(), "fsdp", 1, after_step=after)


@pytest.fixture
def holders():
    servers = [BackupServer("127.0.0.1", "t") for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


def held(holder) -> list[tuple[int, int]]:
    """(generation, step) of its copies."""
    return sorted((c.key.generation, c.key.step) for c in holder.store.copies())


@pytest.mark.usefixtures("place")
def test_a_generation_that_begins_between_copy_and_push_keeps_its_holder(holders, monkeypatch):
    kept = Kept(holders, every=1)
    kept.backup_client.wait(NEVER)
    is_at_push, may_push = threading.Event(), threading.Event()
    original = client.BackupCopy.slices

    def slices(copy):
        if copy.key.generation == 1:
            is_at_push.set()
            may_push.wait(10)
        return original(copy)

    monkeypatch.setattr(client.BackupCopy, "slices", slices)
    kept.step()
    assert is_at_push.wait(10)
    kept.begin(2)
    may_push.set()
    kept.backup_client.wait(NEVER)
    assert kept.backup_client.own_copies[-1].held_by == kept.backup_client.holders[0]
    assert held(holders[1]) == []


@pytest.mark.usefixtures("place")
def test_holders_do_not_keep_the_copies_of_every_generation(holders):
    """At an interval that no generation here reaches, only the first copies are made."""
    kept = Kept(holders, every=50)
    for generation in range(2, 6):
        kept.step()
        kept.step()
        kept.begin(generation)
    kept.step()
    kept.backup_client.wait(NEVER)
    kept.step()
    kept.backup_client.wait(NEVER)
    assert held(holders[0]) == [(5, 8)]


@pytest.mark.usefixtures("place")
def test_what_is_held_as_it_was_before_goes_to_another_holder_when_its_own_is_lost(holders):
    kept = Kept(holders, every=1)
    kept.step()
    kept.backup_client.wait(NEVER)
    kept.begin(2, is_held=True)
    assert held(holders[0]) == [(1, 0), (1, 1)]
    kept.backup_client.hear([["node1", *holders[1].address]])
    kept.backup_client.wait(NEVER)
    assert held(holders[1]) == [(1, 1)]
    kept.step()
    kept.step()
    kept.backup_client.wait(NEVER)
    assert held(holders[1]) == [(2, 2), (2, 3)]


@pytest.mark.usefixtures("place")
def test_who_pauses_has_its_newest_step_held(holders):
    kept = Kept(holders, every=50)
    kept.step()
    kept.step()
    assert held(holders[0]) == [(1, 0)]
    kept.backup_client.before_pause(kept.strategy.train_state, kept.place)
    kept.backup_client.wait(NEVER)
    assert held(holders[0])[-1] == (1, 2)
    kept.backup_client.before_pause(kept.strategy.train_state, kept.place)
    kept.backup_client.wait(NEVER)
    assert len(kept.backup_client.own_copies) == 2, "it has nothing new to say"


@pytest.fixture
def frozen():
    holder = FrozenHolder()
    yield holder
    holder.close()


def told(kept, kind):
    return [asdict(said) for said in kept.said if type(said) is kind]


@pytest.fixture
def dialled(monkeypatch):
    """How long each connection had to come about: who is waited for has CONNECT_S."""
    patience_s, connect = [], client.connect

    def connect_and_tell(address, token, timeout_s):
        patience_s.append(timeout_s)
        return connect(address, token, timeout_s)

    monkeypatch.setattr(client, "connect", connect_and_tell)
    return patience_s


def test_a_frozen_holder_is_told_of_and_waited_for_once_only(holders, frozen, dialled):
    kept = Kept([], every=1)
    kept.backup_client.wait(NEVER)
    assert told(kept, Protected) == [{"step": 0, "why": "there is no holder"}]
    kept.backup_client.hear([frozen.at])
    began = time.monotonic()
    kept.backup_client.wait(NEVER)
    assert time.monotonic() - began >= timeouts_of(DETECT_S).confirm_s
    assert dialled == [client.CONNECT_S]
    assert told(kept, HolderSilent) == [{"holder": frozen.at}]
    kept.backup_client._failed[frozen.at] = kept.backup_client._failed[frozen.at]._replace(at=-1e9)
    for _ in range(2):
        kept.step()
        kept.backup_client.wait(NEVER)
    assert set(dialled[1:]) == {client.ANSWER_S}, "it is asked whether it is there, no more"
    why = f"127.0.0.1:{frozen.at.port}: timed out"
    assert told(kept, Protected)[1:] == [{"step": s, "why": why} for s in (0, 1, 2)]
    kept.backup_client.hear([["node1", *holders[0].address]])
    kept.backup_client.wait(NEVER)
    assert told(kept, Protected)[-1] == {"step": 2, "why": ""}
    assert held(holders[0]) == [(1, 2)]
    kept.step()
    kept.backup_client.wait(NEVER)
    assert len(told(kept, Protected)) == 5, "once it is over"


def test_who_waits_for_a_frozen_holder_goes_on_as_soon_as_there_is_another(
    holders, frozen, monkeypatch
):
    monkeypatch.setattr(client, "MIN_SILENCE_S", 24 * 3600.0)  # else it would wait for ever
    kept = Kept([], every=1)
    kept.backup_client.wait(NEVER)
    kept.backup_client.hear([frozen.at])
    deadline = time.monotonic() + 60
    while kept.backup_client._sending is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    switch(kept, holders[0])
    assert held(holders[0]) == [(1, 0)]
    assert told(kept, HolderSilent) == []
    assert told(kept, Protected)[-1] == {"step": 0, "why": ""}


def switch(kept, holder):
    kept.backup_client.hear([["node1", *holder.address]])
    kept.backup_client.wait(NEVER)


def test_a_holder_that_failed_is_used_again_once_it_answers(holders):
    kept = Kept(holders[:1], every=1)
    kept.backup_client.wait(NEVER)
    at = kept.backup_client.holders[0]
    kept.backup_client._failed[at] = client.Failure(math.inf, "timed out")
    kept.step()
    kept.backup_client.wait(NEVER)
    assert not kept.backup_client.own_copies[-1].is_held, "it failed just now"
    kept.backup_client._failed[at] = client.Failure(-1e9, "timed out")
    kept.step()
    kept.backup_client.wait(NEVER)
    assert kept.backup_client.own_copies[-1].is_held
    assert [said["why"] for said in told(kept, Protected)] == [
        f"127.0.0.1:{at.port}: timed out",
        "",
    ]
