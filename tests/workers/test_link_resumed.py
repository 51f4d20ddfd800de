"""A worker's link that is unanswered, or whose connection has ended, goes on over a second one to
the same controller."""

import asyncio
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from elastic.on_ray import links
from elastic.on_ray.links import LinkServer
from elastic.protocol import wire
from workers import link as links_end
from workers.health.unanswered import Unanswered
from workers.link import ControllerLink

SILENCE_S = 0.5
LEASE_S = 24 * 3600.0
MADE: list[Any] = []
"""Links, and what they are connected to."""


class Controller:
    """A LinkServer in a loop of its own, reached through a relay that can be cut."""

    def __init__(self) -> None:
        self.heard, self.closed = [], []
        self.loop = asyncio.new_event_loop()
        self.links = LinkServer("secret", self._on_frame, self._on_ended)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.address = self.do(self.links.open("127.0.0.1"))
        MADE.append(self)

    def close(self) -> None:
        self.do(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()

    async def _end(self) -> None:
        for server in self.links._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _on_frame(self, worker: int, header: dict, payload: bytes) -> None:
        self.heard.append((worker, header["type"], header.get("step"), bytes(payload)))

    def _on_ended(self, worker: int, was_reset: bool) -> None:
        self.closed.append((worker, was_reset))

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def send(self, **header) -> None:
        self.loop.call_soon_threadsafe(self.links.send, 3, header)


class Relay:
    """Connections pass until it is cut: then those that exist pass nothing more, for ever, as if
    TCP had not tried again yet, and new ones come about only after it is mended."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self.num_dialled = to, 0
        self._joined: list[socket.socket] = []
        self.address = ("127.0.0.1", 0)
        self._is_turning_away = False
        self._ways: list[threading.Event] = []
        self._is_open = threading.Event()
        self.mend()
        self.listen()
        MADE.append(self)

    def close(self) -> None:
        with suppress(OSError):
            self.refuse()
        self.reset()
        for way in self._ways:
            way.set()
        self._is_open.set()

    def listen(self) -> None:
        self._listener = socket.create_server(self.address)
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """New connections, as a firewall may."""
        self._listener.shutdown(socket.SHUT_RDWR)  # a thread that accepts would keep it open
        self._listener.close()

    def cut(self) -> None:
        self._is_open.clear()
        self._way.clear()

    def mend(self) -> None:
        self._begin_way()
        self._is_open.set()

    def _begin_way(self) -> None:
        self._way = threading.Event()  # of the connections that exist
        self._way.set()
        self._ways.append(self._way)

    def turn_away(self, is_so: bool) -> None:
        """End new connections without a word."""
        self._is_turning_away = is_so

    def reset(self) -> None:
        """All connections that exist, at both ends, as a firewall that forgets them."""
        joined, self._joined, way = self._joined, [], self._way
        self._begin_way()
        way.clear()  # what is on its way is lost, and no end is passed on
        for end in joined:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # a thread that reads would keep it open
        for end in joined:
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self.num_dialled += 1
            if self._is_turning_away:
                near.recv(4096)  # else it would be a reset
                near.close()
                continue
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        self._is_open.wait()
        try:
            far, way = socket.create_connection(self._to), self._way
        except OSError:  # the test is over
            near.close()
            return
        self._joined += [near, far]
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


class Clock:
    """The links' time, which goes on when a test says so, and the looks that one of them takes."""

    def __init__(self) -> None:
        self.now, self.num_looks = time.monotonic(), 0
        clock = self

        class Looking(Unanswered):
            def look(self, connection: socket.socket, now: float) -> float:
                clock.num_looks += 1
                return super().look(connection, now)

        self.unanswered = Looking

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))  # between two looks

    def pass_(self, seconds: float) -> None:
        """Until the link has seen what time it is."""
        self.now += seconds
        num_looks = self.num_looks
        until(lambda: self.num_looks > num_looks + 1)


@pytest.fixture
def clock(monkeypatch):
    """Asked for before the ends, whose link is then as late as the test has it."""
    made = Clock()
    monkeypatch.setattr(links_end, "time", made)
    monkeypatch.setattr(links_end, "Unanswered", made.unanswered)
    return made


@pytest.fixture
def ends():
    controller = Controller()
    relay = Relay(controller.address)
    return controller, relay, link_to(relay.address, lambda: relay.address)


class Ended(Exception):
    """Of a thread of a link, which else ends with its process only."""


class Over:
    """Whoever asks it for anything ends."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Ended

    def __call__(self, *_: object) -> NoReturn:
        raise Ended

    def __enter__(self) -> NoReturn:
        raise Ended

    def __exit__(self, *_: object) -> None:
        pass


class Link(ControllerLink):
    def _read(self) -> None:
        with suppress(Ended):
            super()._read()

    def _redial(self) -> None:
        with suppress(Ended):
            super()._redial()

    def _send_late(self) -> None:
        with suppress(Ended):
            super()._send_late()

    def close(self) -> None:
        waits_for = self._seconds, self._is_full
        self._leave = self._dialled = self._seconds = self._is_full = self._lock = Over()
        self._silence_s = -math.inf
        waits_for[0].put(None)
        waits_for[1].set()
        for connection in (self._connection, self._trying):
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        self._is_leaving = True
        targets = [getattr(t, "_target", None) for t in threading.enumerate()]
        return all(getattr(target, "__self__", None) is not self for target in targets)


def link_to(address: tuple[str, int], find: Callable[[], Any]) -> Link:
    made = Link(
        address, token="secret", worker=3, silence_s=SILENCE_S, lease_s=LEASE_S, find=find,
        on_command=print, on_found=lambda address: {"kind": "working"},
    )  # fmt: skip
    MADE.append(made)
    return made


@pytest.fixture(autouse=True)
def ended():
    """A link would dial for ever, and take files and time from the tests that follow."""
    yield
    made = MADE[::-1]  # links first
    MADE.clear()
    for each in made:
        each.close()
    until(lambda: all(each.has_ended() for each in made if isinstance(each, Link)))


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


def test_words_are_no_silence_and_tell_what_was_heard(clock, ends):
    controller, relay, link = ends
    for step in range(1, 21):
        clock.pass_(SILENCE_S / 3)
        link.send("committed", step=step)
        controller.send(type="word", recorded_step=step, formed=0)
        until(lambda n=step: link.recorded_step == n)
    assert relay.num_dialled == 1
    until(lambda: len(heard(controller)) == 20)
    controller.send(type="word", recorded_step=21, formed=0)
    until(lambda: link.recorded_step == 21)
    assert not link._outbox._sent


def test_the_end_of_the_newest_connection_is_told_and_of_one_that_was_left_is_not(ends):
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
                connection.shutdown(socket.SHUT_WR)
        return controller.closed[:1] == [(3, False)]

    until(end_newest)
    link.send("committed", step=2)
    until(lambda: heard(controller) == [0, 1, 2])


def test_what_was_said_over_connections_that_are_reset_arrives_once_and_in_order(ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])  # there is a link
    controller.send(type="go", step=0)
    told_steps: list[int] = []
    for step in range(1, 40):
        link.send("committed", b"x" * 100_000, step=step)
        controller.send(type="go", step=step)
        if step % 8 == 7:
            relay.reset()
            until(lambda: link._connection is not None)
    until(lambda: len(heard(controller)) >= 40)
    until(lambda: told_steps.extend(told(link)) or len(told_steps) >= 40)
    assert (heard(controller), told_steps) == ([*range(40)], [*range(40)])
    assert link.num_controllers == 1, "it is the same one"
    assert (3, True) in controller.closed


def test_new_connections_that_end_without_a_word_are_no_news_of_the_link(ends):
    """As at a full house. The controller is the same, and what it has not heard is kept for it."""
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    for step, silence in enumerate((relay.cut, relay.reset), start=1):
        relay.turn_away(True)
        silence()
        num_dialled = relay.num_dialled
        link.send("committed", step=step)
        controller.send(type="go", step=step)
        until(lambda n=num_dialled: relay.num_dialled > n + 1)
        relay.turn_away(False)
        relay.mend()
        until(lambda n=step: heard(controller) == [*range(n + 1)])
        until(lambda n=step: link.commands.qsize() == n)
    assert told(link) == [1, 2]
    assert link.num_controllers == 1


def test_a_path_that_is_silent_and_refuses_new_connections_for_a_while_loses_nothing(ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])  # there is a link
    controller.send(type="go", step=0)
    until(lambda: link.commands.qsize() == 1)
    relay.cut()
    relay.refuse()
    link.send("committed", step=1)
    controller.send(type="go", step=1)
    threading.Event().wait(4 * SILENCE_S)
    relay.listen()
    relay.mend()
    until(lambda: heard(controller) == [0, 1] and link.commands.qsize() == 2)
    assert (told(link), link.num_controllers) == ([0, 1], 1)
    assert controller.closed == []


def test_a_controller_that_is_slow_is_not_left_while_new_connections_are_refused(clock, ends):
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    relay.refuse()
    for _ in range(8):
        clock.pass_(SILENCE_S / 2)
    link.send("committed", step=1)
    controller.send(type="go", step=1)
    until(lambda: heard(controller) == [0, 1] and told(link) == [1])
    assert (relay.num_dialled, controller.closed) == (1, [])


def test_a_link_that_is_silent_and_refused_follows_a_successor_elsewhere(clock):
    """Its controller has died, and no word of that came through. Once the successor is known, it
    takes no time of the link's."""
    controller, successor = Controller(), Controller()
    relay, found = Relay(controller.address), []
    link = link_to(relay.address, lambda: successor.address if found else None)
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    relay.cut()
    relay.refuse()
    for _ in range(4):
        clock.pass_(SILENCE_S / 2)
    found.append(True)
    until(lambda: [kind for _, kind, *_ in successor.heard] == ["standing"])
    link.send("committed", step=1)
    until(lambda: heard(successor) == [1])


def test_a_controller_that_says_it_does_not_know_the_link_is_introduced_to(ends):
    """As a successor that listens where its predecessor did."""
    controller, relay, link = ends
    link.send("committed", step=0)
    until(lambda: heard(controller) == [0])
    controller.loop.call_soon_threadsafe(controller.links._links.clear)
    relay.reset()
    until(lambda: "standing" in [kind for _, kind, *_ in controller.heard])
    link.send("committed", step=1)
    until(lambda: heard(controller) == [0, 1])
    assert link.num_controllers == 2


def test_a_link_whose_controller_has_gone_without_a_word_looks_for_another():
    """The first one's host was cut off when its process died, and another listens there."""
    deaf = socket.create_server(("127.0.0.1", 0))
    found = []

    def find():
        found.append(True)

    link = link_to(deaf.getsockname(), find)
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
            assert wire.receive(stranger)[0] == {"type": "unknown"}
        with socket.create_connection(controller.address, timeout=20) as stranger:
            wire.send(stranger, {**hello, "token": "guess", "worker": 4, "resumes": True})
            with pytest.raises(wire.ConnectionClosed):
                wire.receive(stranger)
    assert controller.closed == []
