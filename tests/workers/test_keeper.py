"""One rank's side of peer memory, with holders in the same process."""

import threading
from dataclasses import replace

import pytest

from tests.workers.places import Place
from tests.workers.sharded_rig import build, enter, spec, train
from workers.groups import Alone
from workers.peer_memory import keeper as keepers
from workers.peer_memory.holder import HolderServer
from workers.peer_memory.keeper import Keeper

NEVER = lambda: False  # noqa: E731


class Kept:
    """A replica of one rank, kept in the first of two holders."""

    def __init__(self, holders, every):
        self.replica, self.said = build("fsdp"), []
        config = replace(spec("fsdp"), snapshot_every=every)
        self.keeper = Keeper(config, lambda kind, **fields: self.said.append((kind, fields)))
        self.replica.sharded.keeper = self.keeper
        self.keeper.hear([[f"node{i}", *h.address] for i, h in enumerate(holders)])
        enter(self.replica, Alone(), 0, generation=1)
        self.begin(1)

    def begin(self, generation, is_held=False):
        self.place = Place(generation)
        self.keeper.begin(self.replica, 1, self.place, is_held=is_held)

    def step(self):
        self.keeper.wait(NEVER)
        after = lambda replica: self.keeper.after_step(replica, self.place)  # noqa: E731
        train(self.replica, Alone(), "fsdp", 1, after_step=after)


@pytest.fixture
def holders():
    servers = [HolderServer("127.0.0.1", "t") for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


def held(holder) -> list[tuple[int, int]]:
    """(generation, step) of its copies."""
    return sorted((c.key.generation, c.key.step) for c in holder.shelf.copies())


def test_a_generation_that_begins_between_copy_and_push_keeps_its_holder(holders, monkeypatch):
    kept = Kept(holders, every=1)
    kept.keeper.wait(NEVER)
    is_at_push, may_push = threading.Event(), threading.Event()
    original = keepers.Shadow.slices

    def slices(shadow):
        if shadow.key.generation == 1:
            is_at_push.set()
            may_push.wait(10)
        return original(shadow)

    monkeypatch.setattr(keepers.Shadow, "slices", slices)
    kept.step()
    assert is_at_push.wait(10)
    kept.begin(2)
    may_push.set()
    kept.keeper.wait(NEVER)
    assert kept.keeper.shadows[-1].held_by == kept.keeper.holders[0]
    assert held(holders[1]) == []


def test_holders_do_not_keep_the_copies_of_every_generation(holders):
    """At an interval that no generation here reaches, only the first copies are made."""
    kept = Kept(holders, every=50)
    for generation in range(2, 6):
        kept.step()
        kept.step()
        kept.begin(generation)
    kept.step()
    kept.keeper.wait(NEVER)
    kept.step()
    kept.keeper.wait(NEVER)
    assert held(holders[0]) == [(5, 8)]


def test_what_is_held_as_it_was_before_goes_to_another_holder_when_its_own_is_lost(holders):
    kept = Kept(holders, every=1)
    kept.step()
    kept.keeper.wait(NEVER)
    kept.begin(2, is_held=True)
    assert held(holders[0]) == [(1, 0), (1, 1)]
    kept.keeper.hear([["node1", *holders[1].address]])
    kept.keeper.wait(NEVER)
    assert held(holders[1]) == [(1, 1)]
    kept.step()
    kept.step()
    kept.keeper.wait(NEVER)
    assert held(holders[1]) == [(2, 2), (2, 3)]


def test_who_pauses_has_its_newest_step_held(holders):
    kept = Kept(holders, every=50)
    kept.step()
    kept.step()
    assert held(holders[0]) == [(1, 0)]
    kept.keeper.before_pause(kept.replica, kept.place)
    kept.keeper.wait(NEVER)
    assert held(holders[0])[-1] == (1, 2)
    kept.keeper.before_pause(kept.replica, kept.place)
    kept.keeper.wait(NEVER)
    assert len(kept.keeper.shadows) == 2, "it has nothing new to say"
