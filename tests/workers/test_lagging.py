"""A newcomer whose link carries less than the steps bring."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.protocol.errors import PeerLost
from tests.workers.session_rig import Rig
from workers import peer
from workers.digest import weights_sha256
from workers.rendezvous import Rendezvous

LONG_S = 60.0
STEPS_MEANWHILE, STEPS = 4, 6


@pytest.fixture
def slow_link(monkeypatch):
    """The first state is on its way until `is_through`; whoever has `begun` to send it waits."""
    begun, is_through, send_snapshot = threading.Event(), threading.Event(), peer.send_snapshot

    def slowly(*arguments):
        begun.set()
        assert is_through.wait(LONG_S)
        send_snapshot(*arguments)

    monkeypatch.setattr(peer, "send_snapshot", slowly)
    monkeypatch.setattr(peer, "MAX_QUEUED_BYTES", 0)
    yield begun, is_through
    is_through.set()


@pytest.fixture
def rigs():
    torch.set_num_threads(1)
    made = [Rig("bitwise", join_timeout_s=LONG_S, worker=worker) for worker in range(3)]
    yield made
    for rig in made:
        rig.loader.close()


def steps_of(rig: Rig, last: int) -> str:
    while rig.replica.step < last:
        rig.step()
    return weights_sha256(rig.replica.model)


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
    address = list(source.member._followers._server.address)
    newcomer.member._obey({"type": "sync", "address": address}, b"")
    begun, is_through = slow_link
    while not begun.is_set():
        source.member._take_on_newcomers()
        begun.wait(0.01)
    steps_of(source, STEPS_MEANWHILE)
    is_through.set()
    copy_until_level(newcomer)


def test_it_gets_the_state_anew_when_it_is_let_in(slow_link, rigs):
    source, newcomer, calm = rigs
    lag(source, newcomer, slow_link)
    assert newcomer.replica.step < STEPS_MEANWHILE, "it was sent what came later"
    rendezvous = Rendezvous("127.0.0.1")
    for rank, rig in enumerate((source, newcomer)):
        rig.form(2, STEPS_MEANWHILE, rank=rank, world_size=2, store=rendezvous.open(2))
    source.member.should_pause = True
    with ThreadPoolExecutor(2) as both:
        hashes = list(both.map(lambda rig: steps_of(rig, STEPS), (source, newcomer)))
    rendezvous.forget()
    begin(calm)
    assert hashes == [steps_of(calm, STEPS)] * 2
    assert [kind for kind, _, _ in newcomer.link.sent if kind in ("synced", "joined")] == [
        "synced",
        "joined",
    ]


def test_a_source_that_is_gone_then_costs_the_newcomer_its_state(slow_link, rigs):
    source, newcomer, _ = rigs
    lag(source, newcomer, slow_link)
    (follower,) = source.member._followers._all
    follower.close()
    with pytest.raises(PeerLost, match="cannot reach step 4"):
        newcomer.member._copying.catch_up_late(STEPS_MEANWHILE, lambda: False)
