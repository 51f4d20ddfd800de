"""A worker's link that is unanswered goes on over a second connection to the same controller."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from elastic.on_ray import links
from elastic.on_ray.links import LinkServer
from elastic.protocol import wire
from workers.link import ControllerLink

SILENCE_S = 0.5
LEASE_S = 24 * 3600.0


class Controller:
    """A LinkServer in a loop of its own, reached through a relay that can be cut."""

    def __init__(self) -> None:
        self.heard, self.closed = [], []
        self.loop = asyncio.new_event_loop()
        self.links = LinkServer("secret", self._on_frame, self.closed.append)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.address = self.do(self.links.open("127.0.0.1"))

    def _on_frame(self, worker: int, header: dict, payload: bytes) -> None:
        self.heard.append((worker, header["type"], header.get("step"), bytes(payload)))

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def send(self, **header) -> None:
        self.loop.call_soon_threadsafe(self.links.send, 3, header)


class Relay:
    """Connections pass until it is cut: then those that exist pass nothing more, for ever, as if
    TCP had not tried again yet, and new ones come about only after it is mended."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self.num_dialled = to, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._way = threading.Event()  # of the connections that exist
        self._is_open = threading.Event()
        self.mend()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_open.clear()
        self._way.clear()

    def mend(self) -> None:
        self._way = threading.Event()
        self._way.set()
        self._is_open.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            self.num_dialled += 1
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        self._is_open.wait()
        far, way = socket.create_connection(self._to), self._way
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(*ends, way), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: threading.Event) -> None:
        try:
            while content := one.recv(4096):
                way.wait()
                other.sendall(content)
            way.wait()
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.fixture
def ends():
    controller = Controller()
    relay = Relay(controller.address)
    commands = []
    link = ControllerLink(
        relay.address,
        token="secret",
        worker=3,
        silence_s=SILENCE_S,
        lease_s=LEASE_S,
        find=lambda: None,
        on_command=commands.append,
        on_found=lambda address: {},
    )
    return controller, relay, link


def heard(controller: Controller) -> list:
    return [step for _, kind, step, _ in controller.heard if kind == "committed"]


def told(link: ControllerLink) -> list:
    found = []
    while not link.commands.empty():
        found.append(link.commands.get()[0]["step"])
    return found


def test_what_was_said_during_a_cut_arrives_once_and_in_order_after_it(ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    controller.send(type="go", step=0)
    until(lambda: not link.commands.empty())
    relay.cut()
    for step in range(1, 4):
        link.send("committed", b"x" * 100_000, step=step)
        controller.send(type="go", step=step)
    until(lambda: relay.num_dialled > 1)
    assert heard(controller) == [0]
    relay.mend()
    until(lambda: len(heard(controller)) == 4)
    until(lambda: link.commands.qsize() == 4)
    link.send("committed", step=4)
    controller.send(type="go", step=4)
    until(lambda: len(heard(controller)) == 5)
    until(lambda: link.commands.qsize() == 5)
    assert (heard(controller), told(link)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert controller.closed == [], "nobody is lost by it"


def test_a_controller_that_is_slow_loses_nobody_and_hears_everything_once(ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    resting = threading.Event()
    controller.loop.call_soon_threadsafe(resting.wait, 20)
    for step in range(1, 4):
        link.send("committed", step=step)
    until(lambda: relay.num_dialled > 3)  # it gives some connections up
    resting.set()
    until(lambda: heard(controller) == [0, 1, 2, 3])
    num_dialled = relay.num_dialled
    until(lambda: relay.num_dialled > num_dialled)  # no word ever comes here
    link.send("committed", step=4)
    until(lambda: heard(controller) == [0, 1, 2, 3, 4])
    assert controller.closed == []


def test_a_controller_that_is_slow_again_while_a_link_is_taken_up_loses_nobody(ends):
    """It has said that it knows the link, and says nothing more for a while."""
    controller, _, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    resting, original = [threading.Event() for _ in range(2)], controller.links._resumed

    async def resumed(*connection):
        rest = resting.pop() if resting else None
        if rest is not None:
            controller.loop.call_later(0.01, rest.wait, 3 * SILENCE_S)  # after "known"
        return await original(*connection)

    controller.links._resumed = resumed
    until(lambda: not resting)
    link.send("committed", step=1)
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == []


def test_a_reader_that_is_kept_up_while_a_link_is_taken_up_loses_nobody(ends, monkeypatch):
    """The controller gives the second connection up, and a third is taken."""
    monkeypatch.setattr(links, "HELLO_S", 0.2)
    controller, _, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    original, kept_up = link._next_second, []

    def next_second():
        second = original()
        if not kept_up:
            kept_up.append(True)
            time.sleep(1.0)  # the fault
        return second

    link._next_second = next_second
    until(lambda: bool(kept_up))
    link.send("committed", step=1)
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == []


def test_words_are_no_silence_and_tell_what_was_heard(ends):
    controller, relay, link = ends
    for step in range(20):
        link.send("committed", step=step)
        controller.send(type="word", recorded_step=step, formed=0)
        threading.Event().wait(0.1)
    until(lambda: link.recorded_step == 19)
    assert relay.num_dialled == 1
    assert len(link._outbox._sent) <= 1, "the last word may have been quicker"


def test_the_end_of_the_newest_connection_is_the_end_of_the_worker(ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    relay.cut()
    until(lambda: relay.num_dialled > 1)
    relay.mend()
    link.send("committed", step=1)
    until(lambda: heard(controller) == [0, 1])
    assert controller.closed == [], "the first one's end was none"

    def end_newest() -> bool:  # no word ever comes here, so there is a new one ever and again
        connection = link._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return controller.closed == [3]

    until(end_newest)


def test_a_link_whose_controller_has_gone_without_a_word_looks_for_another():
    """The first one's host was cut off when its process died, and another listens there."""
    deaf = socket.create_server(("127.0.0.1", 0))
    found = []

    def find():
        found.append(True)

    link = ControllerLink(
        deaf.getsockname(), token="secret", worker=3, silence_s=SILENCE_S, lease_s=LEASE_S,
        find=find, on_command=print, on_found=lambda address: {},
    )  # fmt: skip
    first, _ = deaf.accept()
    assert wire.receive(first)[0]["resumes"] is False
    deaf.settimeout(20)
    second, _ = deaf.accept()
    assert wire.receive(second)[0]["resumes"] is True
    assert not found
    second.close()
    until(lambda: bool(found))
    assert link.commands.empty()


def test_a_worker_that_was_lost_during_a_cut_is_told_so_when_it_dials():
    controller = Controller()
    hello = {"type": "hello", "role": "worker", "worker": 3, "token": "secret", "session": "a"}
    with socket.create_connection(controller.address, timeout=20) as first:
        wire.send(first, {**hello, "resumes": False})
        wire.send(first, {"type": "committed", "step": 0})
        until(lambda: heard(controller) == [0])
        controller.loop.call_soon_threadsafe(controller.links.drop, 3)
        with socket.create_connection(controller.address, timeout=20) as second:
            wire.send(second, {**hello, "resumes": True})
            assert wire.receive(second)[0] == {"type": "leave"}
        with socket.create_connection(controller.address, timeout=20) as stranger:
            wire.send(stranger, {**hello, "worker": 4, "resumes": True})
            with pytest.raises(wire.ConnectionClosed):
                wire.receive(stranger)
    assert controller.closed == []
