"""A newcomer whose link carries less than the steps bring."""

import threading

import torch

from tests.workers.ranks import run_ranks
from tests.workers.session_rig import Rig
from workers import peer
from workers.digest import weights_sha256

LONG_S = 60.0
SLOW_STEPS, STEPS = 4, 6


def steps_of(rig: Rig, last: int) -> None:
    while rig.replica.step < last:
        rig.step()


def source(ranks, store) -> Rig:
    """Its newcomer's connection takes the first state only after SLOW_STEPS steps."""
    is_slow, send_snapshot, arrived = threading.Event(), peer.send_snapshot, threading.Event()

    def slowly(*arguments):
        arrived.set()
        assert is_slow.wait(LONG_S)
        send_snapshot(*arguments)

    peer.send_snapshot, peer.MAX_QUEUED_BYTES = slowly, 0
    rig = Rig("bitwise", join_timeout_s=LONG_S)
    rig.form(1, 0)
    assert rig.session.step == 0
    store.set("source", str(rig.member._followers._server.address[1]))
    while not arrived.is_set():
        rig.member._take_on_newcomers()
        arrived.wait(0.01)
    steps_of(rig, SLOW_STEPS)
    is_slow.set()
    store.wait(["level"])
    return rig


def newcomer(ranks, store) -> Rig:
    rig = Rig("bitwise", join_timeout_s=LONG_S, worker=1)
    address = ["127.0.0.1", int(store.get("source"))]
    rig.member._obey({"type": "sync", "address": address}, b"")
    copying = rig.member._copying
    while not rig.link.of("synced"):
        assert copying._following is not None
        copying._following.arrived.wait(LONG_S)
        copying._following.arrived.clear()
        copying.apply_received()
    store.set("level", "")
    return rig


def test_it_gets_the_state_anew_when_it_is_let_in():
    def body(ranks):
        torch.set_num_threads(1)
        store = ranks._store()
        rig = (newcomer if ranks.index else source)(ranks, store)
        stood_at = rig.replica.step
        rig.form(2, SLOW_STEPS, rank=ranks.index, world_size=2, store=ranks.address)
        steps_of(rig, STEPS)
        told = [kind for kind, _, _ in rig.link.sent if kind in ("synced", "connected", "joined")]
        rig.loader.close()
        return stood_at, told, weights_sha256(rig.replica.model)

    (_, _, ours), (stood_at, told, theirs) = run_ranks(2, body)
    assert stood_at < SLOW_STEPS, "it was sent what came later"
    assert told == ["synced", "connected", "joined"]
    calm = Rig("bitwise")
    calm.form(1, 0)
    assert calm.session.step == 0
    steps_of(calm, STEPS)
    assert ours == theirs == weights_sha256(calm.replica.model)
    calm.loader.close()
