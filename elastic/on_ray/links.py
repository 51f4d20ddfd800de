"""The controller's ends of the links to its workers and their pulses (asyncio TCP).

Messages in, messages out; what they mean is decided in elastic/on_ray/cluster.py.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.protocol import wire
from elastic.protocol.in_force import CommandsInForce
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello, Leave, hello_in, other_version
from elastic.protocol.messages.pulse import FROM_PULSE, Question, Said
from elastic.protocol.messages.to_controller import TO_CONTROLLER, LastWords, Report
from elastic.protocol.messages.to_worker import ToWorker, Word
from elastic.protocol.wire import HELLO_S, has_token

log = logging.getLogger(__name__)

BUFFER_BYTES = 2**18
"""Of what has come on a connection and was not read; twice that of one that says nothing of use."""
MAX_STRANGERS = 512
"""Connections at a time that have not shown the token, whoever they are; so many come at once to
the successor of a controller of 256 workers."""
STRANGERS_PER_WORKER = 4
"""And so many more for each worker that has a link: when all connections are reset at once, each
link and each pulse dials, perhaps twice."""

OnReport = Callable[[int, Report], None]
OnPulse = Callable[[int, Said], None]
OnEnded = Callable[[int, bool], None]
"""A worker's number, and whether its connection was reset: else it was closed at the other end."""


@dataclass
class Link:
    """To one worker, over one connection at a time."""

    number: int = -1
    """Of the connection, as the worker counts them."""
    writer: asyncio.StreamWriter | None = None
    """None: the connection has ended, and the worker may come back over another one."""
    in_force: CommandsInForce = field(default_factory=CommandsInForce)


class LinkServer:
    """Accepts workers and pulses that know the run's token; one link per worker.

    A worker whose connection does not answer, or has ended, makes another one. There it is told
    again what is in force, and the end of a connection that was left is no news.
    """

    def __init__(
        self, token: str, on_report: OnReport, on_pulse: OnPulse, on_ended: OnEnded
    ) -> None:
        self._token = token
        self._on_report, self._on_pulse, self._on_ended = on_report, on_pulse, on_ended
        self._links: dict[int, Link] = {}
        self._dropped: set[int] = set()
        self._pulses: dict[int, asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Who has not shown the token, the oldest first."""
        self._servers: list[asyncio.Server] = []
        self._addresses: set[tuple[str, int]] = set()

    async def open(self, host: str) -> tuple[str, int]:
        """Listen on a free port of `host`; returns the address to dial."""
        return await self._listen(host, 0)

    async def open_also(self, address: tuple[str, int]) -> bool:
        """Listen where a predecessor did; False if that cannot be, as on another host."""
        if address not in self._addresses:
            try:
                await self._listen(*address)
            except OSError:
                return False
        return True

    async def _listen(self, host: str, port: int) -> tuple[str, int]:
        server = await asyncio.start_server(
            self._serve, host, port, limit=BUFFER_BYTES, backlog=MAX_STRANGERS
        )
        address: tuple[str, int] = host, server.sockets[0].getsockname()[1]
        self._servers.append(server)
        self._addresses.add(address)
        return address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if (hello := await self._greeted(reader, writer)) is not None:
                serve = self._serve_pulse if hello.role == "pulse" else self._serve_worker
                await serve(hello, reader, writer)
        except (asyncio.IncompleteReadError, OSError, ValueError):
            pass  # closed by the other side, or not one of ours
        finally:
            writer.close()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Hello | None:
        """The first frame of somebody who shows the token; None if that is not shown in time."""
        if len(self._strangers) >= MAX_STRANGERS + STRANGERS_PER_WORKER * len(self._links):
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            header, _ = await asyncio.wait_for(receive(reader, is_hello=True), HELLO_S)
        finally:
            has_made_room = writer not in self._strangers
            self._strangers.pop(writer, None)
        if has_made_room or not has_token(header, self._token):
            return None
        return self._talkable(header, writer)

    def _talkable(self, header: wire.Header, writer: asyncio.StreamWriter) -> Hello | None:
        """Who shows the token, if both ends speak the same version."""
        worker = header.get("worker")
        if not isinstance(worker, int):
            return None
        if why := other_version(header):
            log.error('worker=%s refused reason="%s"', worker_name(worker), why)
            writer.write(pack(Leave(why)))
            self._on_report(worker, LastWords(why))  # else only its death would be known
            return None
        return hello_in(header)

    async def _serve_pulse(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        worker = hello.worker
        self._pulses[worker] = writer
        try:
            while True:
                self._on_pulse(worker, FROM_PULSE.read(*await receive(reader)))
        finally:
            if self._pulses.get(worker) is writer:
                del self._pulses[worker]

    async def _serve_worker(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        worker = hello.worker
        if worker in self._dropped:
            writer.write(pack(Leave()))
            return
        link = self._links.setdefault(worker, Link())
        if hello.number <= link.number:
            return  # it was given up before we heard of it
        former, link.number, link.writer = link.writer, hello.number, writer
        if former is not None:
            former.close()
        for command in link.in_force.again():
            writer.write(pack(command))
        was_reset = True
        try:
            while link.writer is writer:
                report = TO_CONTROLLER.read(*await receive(reader))
                if link.writer is not writer:
                    return  # what counts of it is said again elsewhere
                link.in_force.answered(report)
                self._on_report(worker, report)
        except asyncio.IncompleteReadError:
            was_reset = False
        finally:
            if link.writer is writer and self._links.get(worker) is link:
                link.writer = None
                self._on_ended(worker, was_reset)

    def is_connected(self, worker: int) -> bool:
        link = self._links.get(worker)
        return link is not None and link.writer is not None

    def ask_pulse(self, worker: int, question: Question) -> bool:
        """Queue a question for the worker's pulse; False if it has none."""
        writer = self._pulses.get(worker)
        if writer is not None:
            writer.write(pack(question))
        return writer is not None

    def send(self, worker: int, message: ToWorker) -> None:
        """Queue it for `worker`; silently nothing if it has no link (its loss is news)."""
        link = self._links.get(worker)
        if link is None:
            return
        if not isinstance(message, Word | Leave):
            link.in_force.say(message)
        if link.writer is not None:
            link.writer.write(pack(message))

    def drop(self, worker: int) -> None:
        """Close the link of a worker that is no longer part of the run, without a report.

        It is told to leave, else it would look for another controller.
        """
        self._dropped.add(worker)
        link = self._links.pop(worker, None)
        if link is not None and link.writer is not None:
            link.writer.write(pack(Leave()))
            link.writer.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for worker in tuple(self._links):
            self.drop(worker)


async def receive(
    reader: asyncio.StreamReader, *, is_hello: bool = False
) -> tuple[wire.Header, bytes]:
    """The next frame. Raises BadFrame for one that is none of ours."""
    head = await reader.readexactly(wire.LENGTHS.size)
    header_bytes, payload_bytes = wire.lengths_of(head, is_hello=is_hello)
    header = wire.parse(await reader.readexactly(header_bytes))
    return header, await reader.readexactly(payload_bytes)
