"""A newcomer whose link carries less than the steps bring."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from elastic.protocol.errors import PeerLost
from elastic.protocol.messages import peer
from elastic.protocol.messages.to_worker import Sync
from elastic.protocol.step_record import KnownSteps
from tests.workers import where
from tests.workers.session_rig import Rig, abort, obey
from tests.workers.waits import waits
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import Alone
from workers.distributed.rendezvous import Rendezvous
from workers.membership import member, state_stream
from workers.train_state.digest import weights_sha256
from workers.train_state.snapshot import HostMemory

pytestmark = pytest.mark.usefixtures("place")
LONG_S = 60.0
LIMIT_S = 6.0
"""Of the backend, for one collective. A rank that is late by less is no loss."""
STEPS_MEANWHILE, STEPS = 4, 6


@pytest.fixture
def slow_link(monkeypatch):
    """The first state is on its way until `is_through`; whoever has `begun` to send it waits."""
    begun, is_through, send_state = (
        threading.Event(),
        threading.Event(),
        state_stream.send_state,
    )

    def slowly(*arguments):
        begun.set()
        assert is_through.wait(LONG_S)
        send_state(*arguments)

    monkeypatch.setattr(state_stream, "send_state", slowly)
    monkeypatch.setattr(state_stream, "MAX_QUEUED_BYTES", 0)
    yield begun, is_through
    is_through.set()


@pytest.fixture
def rigs(place, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(member, "connect_for", where.connecting_threads())
    made = [Rig("bitwise", thread=rank, join_s=LONG_S, worker=rank) for rank in range(3)]
    yield made
    for rig in made:
        rig.loader.close()


def steps_of(rig: Rig, last: int) -> str:
    while rig.train_state.step < last:
        rig.step()
    return weights_sha256(rig.train_state.model)


def begin(rig: Rig) -> None:
    rig.form(1, 0)
    assert rig.session.step == 0  # waits for the generation


def copy_until_level(rig: Rig) -> None:
    following = rig.member._copying._following
    assert following is not None
    while not rig.link.of("synced"):
        following.arrived.wait(LONG_S)
        following.arrived.clear()
        rig.member._copying.apply_received()


def lag(source: Rig, newcomer: Rig, slow_link) -> None:
    begin(source)
    address = list(source.member.followers._server.address)
    obey(newcomer.member, Sync(0, address))
    begun, is_through = slow_link
    while not begun.is_set():
        source.member._take_on_newcomers()
        begun.wait(0.01)
    steps_of(source, STEPS_MEANWHILE)
    is_through.set()
    copy_until_level(newcomer)


def enter_together(source: Rig, newcomer: Rig) -> list[str]:
    """Their hashes after some more steps."""
    rendezvous = Rendezvous("127.0.0.1")
    source.link.commands.put(abort(1))
    for rank, rig in enumerate((source, newcomer)):
        rig.form(2, STEPS_MEANWHILE, rank=rank, world_size=2, store=rendezvous.open(2))
    source.member.hear(abort(1))
    with ThreadPoolExecutor(2) as both:
        hashes = list(both.map(lambda rig: steps_of(rig, STEPS), (source, newcomer)))
    rendezvous.forget()
    return hashes


def test_it_gets_the_state_anew_when_it_is_let_in(slow_link, rigs):
    source, newcomer, calm = rigs
    lag(source, newcomer, slow_link)
    assert newcomer.train_state.step < STEPS_MEANWHILE, "it was sent what came later"
    hashes = enter_together(source, newcomer)
    begin(calm)
    assert hashes == [steps_of(calm, STEPS)] * 2
    assert [kind for kind, _, _ in newcomer.link.sent if kind in ("synced", "joined")] == [
        "synced",
        "joined",
    ]


def test_the_copy_may_take_longer_than_the_backend_lets_a_collective_wait(
    slow_link, rigs, monkeypatch
):
    monkeypatch.setattr(member, "ROUND_OF_JOINING", 0.05 / LONG_S)
    source, newcomer, _ = rigs
    for rig in (source, newcomer):
        rig.member.spec = replace(rig.spec, timeouts=waits(join_s=LONG_S, operation_s=LIMIT_S))
    lag(source, newcomer, slow_link)
    send_state, took_s = state_stream.send_state, []

    def slowly(connection, start, queued):
        snapshot = start.snapshot
        take, began = snapshot.take, time.monotonic()
        pause_s = 1.2 * LIMIT_S / len(snapshot.shapes)

        def take_slowly(name):
            time.sleep(pause_s)  # this is the copy
            return take(name)

        snapshot.take = take_slowly
        send_state(connection, start, queued)
        took_s.append(time.monotonic() - began)

    monkeypatch.setattr(state_stream, "send_state", slowly)
    hashes = enter_together(source, newcomer)
    assert hashes[0] == hashes[1]
    assert took_s[0] > LIMIT_S, "else this shows nothing"


def test_a_source_that_is_gone_then_costs_the_newcomer_its_state(slow_link, rigs):
    source, newcomer, _ = rigs
    lag(source, newcomer, slow_link)
    (follower,) = source.member.followers._all
    follower.close()
    pieces = Pieces(Alone(), lambda: None, LONG_S)
    with pytest.raises(PeerLost, match="cannot reach step 4"):
        newcomer.member._copying.catch_up_late(STEPS_MEANWHILE, 1, pieces)


def test_one_that_lags_is_told_so_once_however_long_an_update_is_on_its_way(monkeypatch):
    monkeypatch.setattr(state_stream, "MAX_QUEUED_BYTES", 2**20)
    ours, theirs = socket.socketpair()
    follower = state_stream.Follower(ours, worker=3)
    large = {"w": torch.zeros(2**20)}  # more than a socket takes
    for step in range(6):
        update = peer.Update(step, True, 1.0, 1, (), KnownSteps((), None))
        follower.offer(update, large)
    kinds = []
    memory = HostMemory()
    follower._queue.put(None)
    with suppress(OSError):
        while True:
            said, _ = state_stream.receive_tensors(theirs, memory, lambda: None)
            kinds.append(type(said))
    assert follower.is_lagging
    assert kinds.count(peer.Lags) == 1
    assert kinds[-1] is peer.Lags
