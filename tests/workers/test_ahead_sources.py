"""What comes from a newcomer's sources, each in its own time: put together if it belongs together,
and else left to the generation that forms.

No ranks: sources are connections over which a test sends what it likes.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.protocol import wire
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages import peer
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.to_worker import Sync
from elastic.protocol.step_record import KnownSteps
from tests.workers.sharded_rig import CPU, spec
from workers.health.vitals import Vitals
from workers.membership import events as e
from workers.membership.ahead import MAX_WAITING_BYTES, CopyingAhead
from workers.membership.state_stream import (
    NOTHING_KNOWN,
    Follower,
    Followers,
    Following,
    PeerServer,
    Start,
    message_of,
    receive_tensors,
)
from workers.parallel.ahead import Sources
from workers.train_state.snapshot import HostMemory, Snapshot
from workers.train_state.train_state import Update

PATIENCE_S = 60.0
NEWCOMER = 2
SIZE_BYTES = 64
"""Of a state's tensor, and of an update's."""
TENSOR = torch.ones(SIZE_BYTES // 4)
NEVER = lambda: False  # noqa: E731
MIXED = e.SourceLost("its sources have not computed a step in the same generation")


def state(step: int, origin: int) -> Start:
    return Start(Snapshot({"step": step, "origin": origin}, {"model/w": TENSOR}), NOTHING_KNOWN)


def update(step: int, origin: int) -> Update:
    return Update(step, True, 1.0, 1, {"w": TENSOR}, {}, {}, (), origin)


class Source:
    """A member, whose state has one tensor."""

    def __init__(self) -> None:
        self.peers = PeerServer("127.0.0.1", "t", lambda: None, 3.0)

    def begin(self, step: int, origin: int) -> None:
        self.take_on()
        self.follower.begin(state(step, origin))

    def take_on(self) -> None:
        arrived: list[Follower] = []
        until(lambda: arrived.extend(self.peers.arrived()) or bool(arrived))
        (self.follower,) = arrived

    def commit(self, step: int, origin: int) -> None:
        self.follower.offer(*message_of(update(step, origin), NOTHING_KNOWN))


class Part:
    """A newcomer's, of the blocks of two sources."""

    def __init__(self) -> None:
        self.train_state, self.steps = self, list[tuple[int, int]]()
        """Where it has stood: step and origin."""
        self.is_whole = False

    def plan(self, sync: Sync) -> Sources:
        mesh = Mesh(spec("pp:2").parallel, 3, (), ((0, 1, 2, 3),))
        return Sources(mesh, NEWCOMER, {0: ((0,),), 1: ((1,),)})

    def install(self, header: dict[str, Any], parts: Any, at: Any) -> None:
        self.steps.append((header["step"], header["origin"]))

    def apply(self, of: Update) -> None:
        self.steps.append((of.step, of.origin))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def finish(self, sources: Sources) -> None:
        self.is_whole = True


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # polling, bounded by the deadline


class Newcomer:
    def __init__(self, *sources: Source, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.part, self.told = Part(), list[e.Event]()
        part: Any = self.part
        self.copying = CopyingAhead(
            spec("pp:2"), part, Vitals(), CPU, self.told.append, max_waiting_bytes
        )
        addresses = tuple(source.peers.address for source in sources)
        sync = Sync(0, None, members=addresses, rank=NEWCOMER)
        assert self.copying.start(sync, lambda: None) is None

    def look_until(self, is_so: Callable[[], bool]) -> None:
        until(lambda: self.copying.look_around() or is_so())


@pytest.mark.parametrize("step", [5, 6])
def test_a_source_that_begins_later_has_the_step_that_its_generation_has_computed(step):
    first, second = Source(), Source()
    newcomer = Newcomer(first, second)
    first.begin(5, 1)
    first.commit(6, 1)
    second.begin(step, 1)
    if step == 5:
        second.commit(6, 1)
    newcomer.look_until(lambda: newcomer.part.steps[-1:] == [(6, 1)])
    assert newcomer.told[-1] == e.CopyLevel()
    newcomer.copying.finish(6, NEVER)
    assert newcomer.part.is_whole


@pytest.mark.parametrize("step", [5, 6])
def test_states_of_a_step_that_two_generations_have_computed_are_not_put_together(step):
    first, second = Source(), Source()
    newcomer = Newcomer(first, second)
    first.begin(5, 1)
    first.commit(6, 1)
    second.begin(step, 2)
    newcomer.look_until(lambda: bool(newcomer.told))
    assert newcomer.told == [MIXED]
    assert {origin for _, origin in newcomer.part.steps} == {1}
    newcomer.copying.finish(7, NEVER)
    assert not newcomer.part.is_whole


def test_updates_that_wait_for_another_source_are_bounded_and_then_left_to_the_generation():
    first, second = Source(), Source()
    newcomer = Newcomer(first, second, max_waiting_bytes=SIZE_BYTES)
    first.begin(5, 1)
    second.take_on()
    for step in range(6, 16):
        first.commit(step, 1)
    newcomer.look_until(lambda: bool(newcomer.told))
    why = "it has sent more steps than can be kept until other sources have"
    assert newcomer.told == [e.SourceLost(why)]
    assert newcomer.copying._sources == [], "what has come is let go"
    until(lambda: first.commit(16, 1) or first.follower.is_lost)


def test_a_source_whose_updates_nobody_uses_is_read_no_further():
    first = Source()
    following = Following(
        first.peers.address,
        token="t",
        worker=NEWCOMER,
        timeout_s=PATIENCE_S,
        detect_s=3.0,
        wake=lambda: None,
        blocks=((0,),),
        max_unused_bytes=SIZE_BYTES,
    )
    first.begin(5, 1)
    for step in range(6, 16):
        first.commit(step, 1)
    until(lambda: following.failure)
    assert following.is_full
    assert following.received.qsize() == 3, "its state and two steps"


def test_a_level_newcomer_whose_other_source_goes_quiet_keeps_nothing_of_the_first():
    first, second = Source(), Source()
    newcomer = Newcomer(first, second, max_waiting_bytes=SIZE_BYTES)
    for source in (first, second):
        source.begin(5, 1)
    newcomer.look_until(lambda: e.CopyLevel() in newcomer.told)
    for step in range(6, 16):
        first.commit(step, 1)
    newcomer.look_until(lambda: newcomer.copying._sources == [])
    newcomer.copying.finish(15, NEVER)
    assert not newcomer.part.is_whole, "it gets its part from the generation"


def test_one_update_of_any_size_may_wait_and_what_was_used_makes_room():
    first, second = Source(), Source()
    newcomer = Newcomer(first, second, max_waiting_bytes=0)
    for source in (first, second):
        source.begin(5, 1)
    for step in range(6, 10):
        for source in (first, second):
            source.commit(step, 1)
        newcomer.look_until(lambda at=step: newcomer.part.steps[-1:] == [(at, 1)])
    newcomer.copying.finish(9, NEVER)
    assert newcomer.part.is_whole


def test_a_newcomer_that_does_not_say_what_it_wants_is_not_waited_for(monkeypatch):
    source = Source()
    monkeypatch.setattr(wire, "HELLO_S", 0.2)
    with socket.create_connection(source.peers.address, PATIENCE_S) as connection:
        connection.sendall(pack(Hello("t", NEWCOMER, "part")))
        assert connection.recv(1) == b"", "the server has closed it"
    assert source.peers.arrived() == []


class Arrived:
    """In place of a server."""

    def __init__(self, *followers: Follower) -> None:
        self._followers = followers

    def arrived(self) -> tuple[Follower, ...]:
        return self._followers


def test_an_offer_looks_up_what_is_known_of_the_step_once():
    pairs = [socket.socketpair() for _ in range(3)]
    peers: Any = Arrived(*(Follower(ours, worker) for worker, (ours, _) in enumerate(pairs)))
    followers, asked = Followers(peers, lambda: state(5, 1)), list[int]()

    def records() -> KnownSteps:
        asked.append(6)
        return NOTHING_KNOWN

    followers.offer(update(6, 1), records)
    assert asked == [], "nobody follows"
    followers.take_on()
    followers.offer(update(6, 1), records)
    assert asked == [6]
    for _, theirs in pairs:
        theirs.settimeout(PATIENCE_S)
        said = [receive_tensors(theirs, HostMemory(), lambda: None)[0] for _ in range(2)]
        assert [type(of) for of in said] == [peer.State, peer.Update]
        theirs.close()
