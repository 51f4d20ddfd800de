"""The controller's ends of the links to its workers and their pulses (asyncio TCP).

Frames in, frames out; what they mean is decided in elastic/on_ray/cluster.py.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic.protocol import wire
from elastic.protocol.outbox import Outbox

HELLO_S = 10.0

OnFrame = Callable[[int, wire.Header, bytes], None]
OnClosed = Callable[[int], None]


@dataclass
class Link:
    """To one worker, over one connection at a time."""

    session: str
    """The worker's word for it: another one is another link."""
    writer: asyncio.StreamWriter
    num_heard: int = 0
    outbox: Outbox = field(default_factory=Outbox)

    def flush(self) -> None:
        while self.outbox.unsent:
            self.writer.write(self.outbox.unsent[0])
            self.outbox.sent()


class LinkServer:
    """Accepts workers and pulses that know the run's token; one link per worker.

    A worker whose connection does not answer makes a second one and takes its link up again there
    ("resume"): the first one's end is no news then.
    """

    def __init__(self, token: str, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._token, self._on_frame, self._on_closed = token, on_frame, on_closed
        self._links: dict[int, Link] = {}
        self._dropped: set[int] = set()
        self._pulses: dict[int, asyncio.StreamWriter] = {}
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
        server = await asyncio.start_server(self._serve, host, port, limit=2**22)
        address: tuple[str, int] = host, server.sockets[0].getsockname()[1]
        self._servers.append(server)
        self._addresses.add(address)
        return address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello, _ = await asyncio.wait_for(receive(reader), HELLO_S)
            if hello.get("token") == self._token:
                worker = int(hello["worker"])
                serve = self._serve_pulse if hello["role"] == "pulse" else self._serve_worker
                await serve(worker, hello, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            pass  # closed by the other side, or not one of ours
        finally:
            writer.close()

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
        finally:
            if link is not None and link.writer is writer and self._links.get(worker) is link:
                del self._links[worker]
                self._on_closed(worker)

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
        link = self._links.get(worker)
        if link is None or link.session != session:
            return None
        writer.write(wire.pack({"type": "known"}))
        resume, _ = await asyncio.wait_for(receive(reader), HELLO_S)
        if self._links.get(worker) is not link:
            return None
        former, link.writer = link.writer, writer
        former.close()
        writer.write(wire.pack({"type": "resumed", "num_heard": link.num_heard}))
        link.outbox.take_up(resume["num_heard"])
        link.flush()
        return link

    def ask_pulse(self, worker: int, header: dict[str, Any]) -> bool:
        """Queue a frame for the worker's pulse; False if it has none."""
        writer = self._pulses.get(worker)
        if writer is not None:
            writer.write(wire.pack(header))
        return writer is not None

    def send(self, worker: int, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a frame for `worker`; silently nothing if its link is closed (its loss is news).

        A "word" is never said again: the next one says more."""
        link = self._links.get(worker)
        if link is None:
            return
        if header["type"] == "word":
            link.writer.write(wire.pack({**header, "num_heard": link.num_heard}, payload))
        else:
            link.outbox.unsent.append(wire.pack(header, payload))
            link.flush()

    def drop(self, worker: int) -> None:
        """Close the link of a worker that is no longer part of the run, without a report.

        It is told to leave, else it would look for another controller.
        """
        self._dropped.add(worker)
        link = self._links.pop(worker, None)
        if link is not None:
            link.writer.write(wire.pack({"type": "leave"}))
            link.writer.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for worker in tuple(self._links):
            self.drop(worker)


async def receive(reader: asyncio.StreamReader) -> tuple[wire.Header, bytes]:
    """The next frame. Raises ValueError for one that is none of ours."""
    head = await reader.readexactly(wire.LENGTHS.size)
    header_bytes, payload_bytes = wire.LENGTHS.unpack(head)
    if header_bytes > wire.MAX_HEADER_BYTES:
        raise ValueError(f"a header of {header_bytes} bytes")
    text = await reader.readexactly(header_bytes)
    return json.loads(text), await reader.readexactly(payload_bytes)
