"""The controller's ends of the links to its workers and their pulses (asyncio TCP).

Frames in, frames out; what they mean is decided in elastic/on_ray/cluster.py.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic.protocol import wire
from elastic.protocol.outbox import Outbox
from elastic.protocol.wire import HELLO_S, has_token

BUFFER_BYTES = 2**18
"""Of what has come on a connection and was not read; twice that of one that says nothing of use."""
MAX_STRANGERS = 512
"""Connections at a time that have not shown the token, whoever they are; so many come at once to
the successor of a controller of 256 workers."""
STRANGERS_PER_WORKER = 4
"""And so many more for each worker that has a link: when all connections are reset at once, each
link and each pulse dials, perhaps twice."""

OnFrame = Callable[[int, wire.Header, bytes], None]
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

    def __init__(self, token: str, on_frame: OnFrame, on_ended: OnEnded) -> None:
        self._token, self._on_frame, self._on_ended = token, on_frame, on_ended
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
                is_pulse = hello.get("role") == "pulse"
                serve = self._serve_pulse if is_pulse else self._serve_worker
                await serve(hello["worker"], hello, reader, writer)
        except (asyncio.IncompleteReadError, OSError, ValueError):
            pass  # closed by the other side, or not one of ours
        finally:
            writer.close()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> wire.Header | None:
        """The first frame of somebody who shows the token; None if that is not shown in time."""
        if len(self._strangers) >= MAX_STRANGERS + STRANGERS_PER_WORKER * len(self._links):
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            hello, _ = await asyncio.wait_for(receive(reader, is_hello=True), HELLO_S)
        finally:
            has_made_room = writer not in self._strangers
            self._strangers.pop(writer, None)
        is_ours = has_token(hello, self._token) and isinstance(hello.get("worker"), int)
        return hello if is_ours and not has_made_room else None

    async def _serve_pulse(
        self,
        worker: int,
        _hello: wire.Header,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._pulses[worker] = writer
        try:
            while True:
                self._on_frame(worker, *await receive(reader))
        finally:
            if self._pulses.get(worker) is writer:
                del self._pulses[worker]

    async def _serve_worker(
        self,
        worker: int,
        hello: wire.Header,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if not hello.get("resumes"):
            link = self._links[worker] = Link(hello.get("session", ""), writer)
        else:
            link = await self._resumed(worker, hello["session"], reader, writer)
        was_reset = True
        try:
            while link is not None and link.writer is writer:
                header, payload = await receive(reader)
                if link.writer is not writer:
                    return  # heard after it was taken up elsewhere, where it is said again
                link.num_heard += 1
                if header["type"] == "heard":
                    link.outbox.heard(header["num_heard"])
                else:
                    self._on_frame(worker, header, payload)
        except asyncio.IncompleteReadError:
            was_reset = False
        finally:
            if link is not None and link.writer is writer and self._links.get(worker) is link:
                link.writer = None
                self._on_ended(worker, was_reset)

    async def _resumed(
        self,
        worker: int,
        session: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Link | None:
        """The worker's link, over this connection from now on; None if there is no such link.

        Only once the worker says so: it may have given this connection up while we were slow.
        """
        if worker in self._dropped:
            writer.write(wire.pack({"type": "leave"}))
            return None
        link = self._links.get(worker)
        if link is None or link.session != session:
            writer.write(wire.pack({"type": "unknown"}))
            return None
        writer.write(wire.pack({"type": "known"}))
        resume, _ = await asyncio.wait_for(receive(reader), HELLO_S)
        if self._links.get(worker) is not link:
            return None
        former, link.writer = link.writer, writer
        if former is not None:
            former.close()
        writer.write(wire.pack({"type": "resumed", "num_heard": link.num_heard}))
        link.outbox.take_up(resume["num_heard"])
        link.flush()
        return link

    def is_connected(self, worker: int) -> bool:
        link = self._links.get(worker)
        return link is not None and link.writer is not None

    def ask_pulse(self, worker: int, header: dict[str, Any]) -> bool:
        """Queue a frame for the worker's pulse; False if it has none."""
        writer = self._pulses.get(worker)
        if writer is not None:
            writer.write(wire.pack(header))
        return writer is not None

    def send(self, worker: int, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a frame for `worker`; silently nothing if it has no link (its loss is news).

        A "word" is never said again: the next one says more."""
        link = self._links.get(worker)
        if link is None:
            return
        if header["type"] != "word":
            link.outbox.unsent.append(wire.pack(header, payload))
            link.flush()
        elif link.writer is not None:
            link.writer.write(wire.pack({**header, "num_heard": link.num_heard}, payload))

    def drop(self, worker: int) -> None:
        """Close the link of a worker that is no longer part of the run, without a report.

        It is told to leave, else it would look for another controller.
        """
        self._dropped.add(worker)
        link = self._links.pop(worker, None)
        if link is not None and link.writer is not None:
            link.writer.write(wire.pack({"type": "leave"}))
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
