"""Frames on the project's own TCP connections: a JSON header and raw bytes. No pickle.

A frame is two little-endian unsigned 32/64-bit lengths, the header, the payload. Every connection
opens with a `hello` header that carries the run token; a wrong token closes it.
"""

import json
import socket
import struct
from collections.abc import Iterable
from typing import Any

LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 * 2**20

Header = dict[str, Any]


class ConnectionClosed(ConnectionError):
    """The other side closed the connection."""


def pack(header: Header, payload: bytes | memoryview = b"") -> bytes:
    """One frame as bytes, for small payloads."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + bytes(payload)


def send(connection: socket.socket, header: Header, chunks: Iterable[memoryview] = ()) -> None:
    """Send one frame; `chunks` are sent without being copied together."""
    parts = [memoryview(c).cast("B") for c in chunks]
    send_header(connection, header, sum(len(p) for p in parts))
    for part in parts:
        connection.sendall(part)


def send_header(connection: socket.socket, header: Header, payload_bytes: int) -> None:
    """The beginning of a frame whose payload the caller sends."""
    text = json.dumps(header, separators=(",", ":")).encode()
    connection.sendall(LENGTHS.pack(len(text), payload_bytes) + text)


def receive_header(connection: socket.socket) -> tuple[Header, int]:
    """The next frame's header and the size of the payload that follows it on the connection."""
    header_bytes, payload_bytes = LENGTHS.unpack(receive_exactly(connection, LENGTHS.size))
    if header_bytes > MAX_HEADER_BYTES:
        raise ConnectionClosed(f"a header of {header_bytes} bytes is not one of ours")
    return json.loads(bytes(receive_exactly(connection, header_bytes))), payload_bytes


def receive(connection: socket.socket) -> tuple[Header, bytearray]:
    header, payload_bytes = receive_header(connection)
    return header, receive_exactly(connection, payload_bytes)


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    buffer = bytearray(size_bytes)
    receive_into(connection, memoryview(buffer))
    return buffer


def receive_into(connection: socket.socket, view: memoryview) -> None:
    view = view.cast("B")
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionClosed("the other side closed the connection")
        view = view[count:]
