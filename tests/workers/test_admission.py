"""Whoever is unknown, hostile or silent: the servers of a run go on serving those they know."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from elastic.on_ray import links
from elastic.on_ray.links import LinkServer
from elastic.protocol import wire
from elastic.protocol.messages.backup import Copies, Have
from elastic.protocol.messages.direction import header_of
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.to_controller import Synced
from workers.backup.server import BackupServer, ask, connect
from workers.distributed import admission
from workers.membership.state_stream import PeerServer

PATIENCE_S = 60
KNOWN = header_of(Hello("secret", 3, "worker"))
NUMBERS = itertools.count(1)


def frame(header: bytes, payload_bytes: int = 0) -> bytes:
    return wire.LENGTHS.pack(len(header), payload_bytes) + header


def said(**fields) -> bytes:
    return json.dumps({**KNOWN, **fields}).encode()


HOSTILE = {
    "nested": frame(b"[" * 100_000),
    "nested and short": frame(b"[" * 4000),
    "announces 1 TiB": frame(said(), 2**40),
    "announces 2^62": frame(said(), 2**62),
    "announces 2^63": frame(said(), 2**63),
    "announces a long header": wire.LENGTHS.pack(2**32 - 1, 0),
    "a list": frame(b"[]"),
    "a number": frame(b"7"),
    "no text": frame(b"\xff\xfe"),
    "another token": frame(said(token="guess")),
    "a token that is a list": frame(said(token=["secret"])),
    "a token of other letters": frame(said(token="\ud800")),
    "no token": frame(b"{}"),
    "a worker that is a list": frame(said(worker=[3])),
    "a worker that is none": frame(said(worker=None)),
    "nothing": b"",
    "half of a frame": frame(said())[:20],
}


class Peers:
    """A worker's server of its state."""

    def __init__(self) -> None:
        self._server = PeerServer("127.0.0.1", "secret", lambda: None, 3.0)
        self.address = self._server.address

    def assert_serves(self) -> None:
        with socket.create_connection(self.address, timeout=PATIENCE_S) as connection:
            wire.send(connection, KNOWN)
            deadline = time.monotonic() + PATIENCE_S
            while not (found := self._server.arrived()):
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            assert [f.worker for f in found] == [3]
            found[0].close()


class Holder:
    def __init__(self) -> None:
        self._server = BackupServer("127.0.0.1", "secret")
        self.address = self._server.address

    def assert_serves(self) -> None:
        with connect(self.address, "secret", PATIENCE_S) as connection:
            assert ask(connection, Have()) == Copies(())


class Controller:
    def __init__(self) -> None:
        self._heard = threading.Event()
        loop = asyncio.new_event_loop()
        self._server = LinkServer(
            "secret", lambda *_: self._heard.set(), lambda *_: None, lambda *_: None
        )
        threading.Thread(target=loop.run_forever, daemon=True).start()
        opened = asyncio.run_coroutine_threadsafe(self._server.open("127.0.0.1"), loop)
        self.address = opened.result(PATIENCE_S)

    def assert_serves(self) -> None:
        self._heard.clear()
        with socket.create_connection(self.address, timeout=PATIENCE_S) as connection:
            wire.send(connection, {**KNOWN, "number": next(NUMBERS)})
            wire.send(connection, header_of(Synced(0)))
            assert self._heard.wait(PATIENCE_S)


@pytest.fixture(scope="module", params=[Peers, Holder, Controller])
def server(request):
    return request.param()


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_whatever_comes_on_a_connection_the_next_one_is_served(server, content):
    with socket.create_connection(server.address, timeout=PATIENCE_S) as hostile:
        with suppress(ConnectionError):
            hostile.sendall(content)
        server.assert_serves()


def test_any_number_of_silent_connections_keeps_nobody_out(server, monkeypatch):
    monkeypatch.setattr(links, "MAX_STRANGERS", admission.MAX_STRANGERS)
    before = threading.active_count()  # servers of other tests are in this process, too
    with ExitStack() as open_:
        for _ in range(3 * admission.MAX_STRANGERS):
            silent = socket.create_connection(server.address, timeout=PATIENCE_S)
            open_.enter_context(silent)
        server.assert_serves()
        deadline = time.monotonic() + PATIENCE_S
        while threading.active_count() - before > admission.MAX_STRANGERS + 1:
            assert time.monotonic() < deadline, "those that made room have no thread any more"
            time.sleep(0.01)  # polling, bounded by the deadline


def test_what_is_announced_is_judged_before_room_is_made_for_it():
    for announced in ((wire.MAX_HELLO_BYTES + 1, 0), (10, 1)):
        with pytest.raises(wire.BadFrame):
            wire.lengths_of(wire.LENGTHS.pack(*announced), is_hello=True)
    for announced in ((wire.MAX_HEADER_BYTES + 1, 0), (10, wire.MAX_PAYLOAD_BYTES + 1)):
        with pytest.raises(wire.BadFrame):
            wire.lengths_of(wire.LENGTHS.pack(*announced))


def test_a_first_frame_that_trickles_in_is_not_waited_for():
    ours, other = socket.socketpair()
    with ours, other:
        other.sendall(frame(said())[:5])
        with pytest.raises(TimeoutError):
            wire.receive_hello(ours, time.monotonic() + 0.2)


ENDS = """
import socket, threading
from {module} import {server}
server = {server}({arguments})
server._listener.shutdown(socket.SHUT_RDWR)  # what it does not know of
threading.Event().wait(60)
"""


@pytest.mark.parametrize(
    ("module", "server", "arguments"),
    [
        ("workers.membership.state_stream", "PeerServer", "'127.0.0.1', 't', print, 3.0"),
        ("workers.backup.server", "BackupServer", "'127.0.0.1', 't'"),
        ("workers.distributed.rendezvous", "StoreServer", "'127.0.0.1'"),
    ],
)
def test_a_process_whose_server_is_dead_ends_so_that_its_loss_is_seen(module, server, arguments):
    script = ENDS.format(module=module, server=server, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == admission.EXIT_WITHOUT_SERVER
    assert "can accept no connection any more" in done.stderr


def test_a_server_that_cannot_start_a_thread_serves_the_next_connection(monkeypatch):
    peers, start, refused = Peers(), threading.Thread.start, []

    def start_later(thread):
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    with socket.create_connection(peers.address, timeout=PATIENCE_S) as connection:
        assert connection.recv(1) == b""
    assert refused
    peers.assert_serves()
