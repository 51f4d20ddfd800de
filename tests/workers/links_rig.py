"""A link, a controller and a path between them that can be cut; and how a link is ended, which else
ends with its process only."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from elastic.on_ray.links import LinkServer
from elastic.protocol.messages.to_controller import Committed, Introduction, Report
from elastic.protocol.messages.to_worker import Checkpoint, ToWorker
from elastic.protocol.step_record import VoteHead
from tests.control.fake_record import step_record
from workers.health.unanswered import Unanswered
from workers.membership.link import ControllerLink

SILENCE_S = 0.5
LEASE_S = 24 * 3600.0
MADE: list[Any] = []
"""Links, and what they are connected to."""


def committed(step: int, payload: bytes = b"") -> Committed:
    """Something for the controller to hear, in force until it is on record."""
    return Committed(1, 0, (step_record(step),), VoteHead(step, ()), payload)


def asked(step: int) -> Checkpoint:
    """Something to tell the worker, in force until the next one."""
    return Checkpoint(1, 0, 1, step)


class Controller:
    """A LinkServer in a loop of its own, reached through a relay that can be cut."""

    def __init__(self) -> None:
        self.heard, self.closed = [], []
        self.loop = asyncio.new_event_loop()
        self.links = LinkServer("secret", self._on_report, lambda *_: None, self._on_ended)
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.address = self.do(self.links.open("127.0.0.1"))
        MADE.append(self)

    def close(self) -> None:
        self.do(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    async def _end(self) -> None:
        for server in self.links._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _on_report(self, worker: int, report: Report) -> None:
        self.heard.append(report)

    def _on_ended(self, worker: int, was_reset: bool) -> None:
        self.closed.append((worker, was_reset))

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def send(self, message: ToWorker) -> None:
        self.loop.call_soon_threadsafe(self.links.send, 3, message)


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
    deadline = time.monotonic() + 60
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
    def _keep(self) -> None:
        with suppress(Ended):
            super()._keep()

    def _send_late(self) -> None:
        with suppress(Ended):
            super()._send_late()

    @property
    def connection(self) -> socket.socket | None:
        return self._outgoing._connection

    def close(self) -> None:
        outgoing = self._outgoing
        is_full, outgoing._is_full = outgoing._is_full, Over()
        self._dial = outgoing._lock = Over()
        is_full.set()
        if (connection := self.connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def has_ended(self) -> bool:
        targets = [getattr(t, "_target", None) for t in threading.enumerate()]
        return all(getattr(target, "__self__", None) is not self for target in targets)


def link_to(address: tuple[str, int], find: Callable[[], Any]) -> Link:
    made = Link(
        address, token="secret", worker=3, silence_s=SILENCE_S, lease_s=LEASE_S, find=find,
        on_command=print, introduce=lambda address: Introduction("working", address),
    )  # fmt: skip
    MADE.append(made)
    return made
