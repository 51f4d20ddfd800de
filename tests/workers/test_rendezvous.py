"""Who may read and write what the members of a generation say of themselves."""

import socket
import threading
from contextlib import suppress
from datetime import timedelta

import pytest
import torch

from elastic.protocol import wire
from elastic.protocol.errors import PeerLost
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from workers.distributed import process_group
from workers.distributed.admission import MAX_STRANGERS
from workers.distributed.backends import connect_for
from workers.distributed.process_group import Formation
from workers.distributed.rendezvous import MAX_VALUE_BYTES, Rendezvous
from workers.distributed.store import StoreClient

LONG_S = 60.0
NUM_MEMBERS = MAX_STRANGERS + 36


@pytest.fixture
def rendezvous():
    made = Rendezvous("127.0.0.1")
    yield made
    made.forget()


def test_what_one_member_sets_another_gets_also_if_it_asks_first(rendezvous):
    address = rendezvous.open(1)
    early, late = StoreClient(address, LONG_S), StoreClient(address, LONG_S)
    got: list[bytes] = []
    asking = threading.Thread(target=lambda: got.append(early.get("0/1")), daemon=True)
    asking.start()
    late.set("0/0", "text")
    late.set("0/1", b"\x00\xff")
    asking.join(LONG_S)
    assert got == [b"\x00\xff"]
    assert early.multi_get(["0/0", "0/1"]) == [b"text", b"\x00\xff"]
    assert early.check(["0/0"])
    assert not early.check(["0/2"])


def test_a_key_that_nobody_sets_is_waited_for_so_long_only(rendezvous):
    store = StoreClient(rendezvous.open(1), LONG_S)
    with pytest.raises(TimeoutError):
        store.wait(["never"], timedelta(seconds=0.05))


def test_a_stranger_reads_and_writes_nothing(rendezvous):
    """It knows the address and not the secret; nor does who knows the last generation's."""
    *_, before = rendezvous.open(1)
    host, port, secret = rendezvous.open(2)
    member = StoreClient((host, port, secret), LONG_S)
    for shown in ("", before, secret.upper() + "0"):
        with pytest.raises(OSError, match=r"closed|reset|Broken|timed out"):
            StoreClient((host, port, shown), 0.2)
        stranger = socket.create_connection((host, port), LONG_S)
        with stranger, suppress(OSError):  # it may be closed already
            stranger.sendall(pack(Hello(shown)))
            wire.send(stranger, {"type": "set", "key": "0/0"}, [memoryview(b"mine")])
            wire.receive(stranger)
            pytest.fail("a stranger got an answer")
    member.set("0/0", b"ours")
    assert StoreClient((host, port, secret), LONG_S).get("0/0") == b"ours"


def test_a_generation_that_is_over_answers_nobody_any_more(rendezvous):
    address = rendezvous.open(1)
    store, idle = StoreClient(address, LONG_S), StoreClient(address, LONG_S)
    failed: list[str] = []

    def ask() -> None:
        try:
            store.get("0/1")
        except OSError as error:
            failed.append(type(error).__name__)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    rendezvous.open(2)
    asking.join(LONG_S)
    assert idle._connection.recv(1) == b"", "who asks for nothing is let go as well"
    assert failed in (["ConnectionClosed"], ["ConnectionResetError"])


def test_more_members_at_a_time_than_strangers_are_let_in_all_get_in(rendezvous):
    address, got = rendezvous.open(1), []

    def meet(rank: int) -> None:
        store = StoreClient(address, LONG_S)
        store.set(f"0/{rank}", str(rank))
        got.append(store.multi_get([f"0/{r}" for r in range(NUM_MEMBERS)]))

    members = [threading.Thread(target=meet, args=(r,), daemon=True) for r in range(NUM_MEMBERS)]
    for member in members:
        member.start()
    for member in members:
        member.join(LONG_S)
    assert got == [[str(r).encode() for r in range(NUM_MEMBERS)]] * NUM_MEMBERS


def test_silent_strangers_and_large_values_keep_nobody_waiting(rendezvous, monkeypatch):
    monkeypatch.setattr(wire, "HELLO_S", 10 * LONG_S)  # so long a stranger may be silent
    host, port, secret = rendezvous.open(1)
    silent = [socket.create_connection((host, port)) for _ in range(300)]
    loud = StoreClient((host, port, secret), LONG_S)
    with suppress(OSError):
        wire.send_header(loud._connection, {"type": "set", "key": "0/0"}, MAX_VALUE_BYTES + 1)
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        loud.get("0/0")
    member = StoreClient((host, port, secret), LONG_S)
    member.set("0/0", b"ours")
    assert member.get("0/0") == b"ours"
    for connection in silent:
        connection.close()


def test_frames_that_are_none_of_ours_end_their_own_connection_only(rendezvous):
    host, port, secret = rendezvous.open(1)
    for header in ({}, {"type": "set"}, {"type": "get", "key": []}, {"type": "get", "seen": "x"}):
        broken = StoreClient((host, port, secret), LONG_S)
        wire.send(broken._connection, header)
        with pytest.raises(OSError, match=r"closed|reset|Broken"):
            broken.get("0/0")
    member = StoreClient((host, port, secret), LONG_S)
    member.set("0/0", b"ours")
    assert member.get("0/0") == b"ours"


def formed(address: tuple[str, int, str], rank: int, timeout_s: float = LONG_S) -> Formation:
    return process_group.form(
        store_address=address, prefix="1", rank=rank, world_size=2,
        connect=connect_for(torch.device("cpu"), "127.0.0.1"),
        join_timeout_s=timeout_s, operation_timeout_s=LONG_S,
    )  # fmt: skip


def test_a_group_forms_over_it_and_who_lacks_the_secret_forms_none(rendezvous):
    host, port, secret = rendezvous.open(1)
    with pytest.raises(PeerLost, match="forming failed"):
        formed((host, port, "guessed"), 0, 0.2).wait(LONG_S)
    forming = [formed((host, port, secret), rank) for rank in range(2)]
    pair = [formation.wait(LONG_S) for formation in forming]
    tensors = [torch.ones(3), torch.ones(3)]
    pending = [group.all_reduce(t) for group, t in zip(pair, tensors, strict=True)]
    for work in pending:
        work.wait()
    assert [t.tolist() for t in tensors] == [[2.0] * 3] * 2
