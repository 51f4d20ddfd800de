"""The controller's ends of the links to its workers and their pulses (asyncio TCP).

Messages in, messages out; what they mean is decided in elastic/on_ray/cluster.py.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic.protocol import wire
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import (
    GREETING,
    Hello,
    Known,
    Leave,
    Resume,
    Resumed,
    Unknown,
    other_version,
)
from elastic.protocol.messages.pulse import FROM_PULSE, Question, Said
from elastic.protocol.messages.to_controller import TO_CONTROLLER, Heard, LastWords, Report
from elastic.protocol.messages.to_worker import ToWorker, Word
from elastic.protocol.outbox import Outbox
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

    session: str
    """The worker's word for it: another one is another link."""
    writer: asyncio.StreamWriter | None
    """None: the connection has ended, and the worker may come back over another one."""
    num_heard: int = 0
    outbox: Outbox = field(default_factory=Outbox)

    def flush(self) -> None:
        while self.writer is not None and self.outbox.unsent:
            self.writer.write(self.outbox.unsent[0])
            self.outbox.sent()


class LinkServer:
    """Accepts workers and pulses that know the run's token; one link per worker.

    A worker whose connection does not answer, or has ended, makes a second one and takes its link
    up again there ("resume"): the end of one that was left is no news. Who has no link here is told
    so ("unknown"): a connection that ends without a word says nothing about it.
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
        hello = GREETING.read(header)
        return hello if isinstance(hello, Hello) else None

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
        if not hello.resumes:
            link = self._links[worker] = Link(hello.session, writer)
        else:
            link = await self._resumed(hello, reader, writer)
        was_reset = True
        try:
            while link is not None and link.writer is writer:
                report = TO_CONTROLLER.read(*await receive(reader))
                if link.writer is not writer:
                    return  # heard after it was taken up elsewhere, where it is said again
                link.num_heard += 1
                if isinstance(report, Heard):
                    link.outbox.heard(report.num_heard)
                else:
                    self._on_report(worker, report)
        except asyncio.IncompleteReadError:
            was_reset = False
        finally:
            if link is not None and link.writer is writer and self._links.get(worker) is link:
                link.writer = None
                self._on_ended(worker, was_reset)

    async def _resumed(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Link | None:
        """The worker's link, over this connection from now on; None if there is no such link.

        Only once the worker says so: it may have given this connection up while we were slow.
        """
        worker = hello.worker
        if worker in self._dropped:
            writer.write(pack(Leave()))
            return None
        link = self._links.get(worker)
        if link is None or link.session != hello.session:
            writer.write(pack(Unknown()))
            return None
        writer.write(pack(Known()))
        resume = GREETING.read(*await asyncio.wait_for(receive(reader), HELLO_S))
        if not isinstance(resume, Resume) or self._links.get(worker) is not link:
            return None
        former, link.writer = link.writer, writer
        if former is not None:
            former.close()
        writer.write(pack(Resumed(link.num_heard)))
        link.outbox.take_up(resume.num_heard)
        link.flush()
        return link

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
        if not isinstance(message, Word):
            link.outbox.unsent.append(pack(message))
            link.flush()
        elif link.writer is not None:
            link.writer.write(pack(replace(message, num_heard=link.num_heard)))

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
