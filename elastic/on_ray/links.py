"""The controller's ends of the links to its workers and their pulses (asyncio TCP).

Frames in, frames out; what they mean is decided in elastic/on_ray/cluster.py.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from elastic.protocol import wire

OnFrame = Callable[[int, wire.Header, bytes], None]
OnClosed = Callable[[int], None]


class LinkServer:
    """Accepts workers and pulses that know the run's token; one link per worker."""

    def __init__(self, token: str, on_frame: OnFrame, on_closed: OnClosed) -> None:
        self._token, self._on_frame, self._on_closed = token, on_frame, on_closed
        self._writers: dict[int, asyncio.StreamWriter] = {}
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
        worker: int | None = None
        is_pulse = True
        try:
            hello, _ = await asyncio.wait_for(_receive(reader), timeout=10)
            if hello.get("token") != self._token:
                return
            worker, is_pulse = int(hello["worker"]), hello["role"] == "pulse"
            (self._pulses if is_pulse else self._writers)[worker] = writer
            while True:
                header, payload = await _receive(reader)
                self._on_frame(worker, header, payload)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            pass  # closed by the other side, or not one of ours
        finally:
            if worker is not None and not is_pulse and self._writers.get(worker) is writer:
                del self._writers[worker]
                self._on_closed(worker)
            if worker is not None and is_pulse and self._pulses.get(worker) is writer:
                del self._pulses[worker]
            writer.close()

    def ask_pulse(self, worker: int, header: dict[str, Any]) -> bool:
        """Queue a frame for the worker's pulse; False if it has none."""
        writer = self._pulses.get(worker)
        if writer is not None:
            writer.write(wire.pack(header))
        return writer is not None

    def send(self, worker: int, header: dict[str, Any], payload: bytes = b"") -> None:
        """Queue a frame for `worker`; silently nothing if its link is closed (its loss is news)."""
        writer = self._writers.get(worker)
        if writer is not None:
            writer.write(wire.pack(header, payload))

    def drop(self, worker: int) -> None:
        """Close the link of a worker that is no longer part of the run, without a report.

        It is told to leave, else it would look for another controller.
        """
        writer = self._writers.pop(worker, None)
        if writer is not None:
            writer.write(wire.pack({"type": "leave"}))
            writer.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for worker in tuple(self._writers):
            self.drop(worker)


async def _receive(reader: asyncio.StreamReader) -> tuple[wire.Header, bytes]:
    head = await reader.readexactly(wire.LENGTHS.size)
    header_bytes, payload_bytes = wire.LENGTHS.unpack(head)
    if header_bytes > wire.MAX_HEADER_BYTES:
        raise ValueError(f"a header of {header_bytes} bytes")
    text = await reader.readexactly(header_bytes)
    return json.loads(text), await reader.readexactly(payload_bytes)
