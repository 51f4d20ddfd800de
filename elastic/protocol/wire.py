"""Frames on the project's own TCP connections: a JSON header and raw bytes. No pickle.

A frame is two little-endian unsigned 32/64-bit lengths, the header, the payload. Every connection
opens with a `hello` header that carries the run token; a wrong token closes it.
"""

import hmac
import json
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, cast

LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 * 2**20
MAX_PAYLOAD_BYTES = 2**40
MAX_HELLO_BYTES = 4096
"""Of the first frame, which has no payload: it comes from somebody unknown."""
HELLO_S = 10.0
"""For the whole first frame."""

Header = dict[str, Any]


class ConnectionClosed(ConnectionError):
    """The other side closed the connection."""


class BadFrame(ConnectionError):
    """What came is no frame of ours: the connection is of no use any more."""


def lengths_of(head: bytes | bytearray, *, is_hello: bool = False) -> tuple[int, int]:
    """Of the header and the payload, before anything is read or made room for. Raises BadFrame."""
    header_bytes, payload_bytes = LENGTHS.unpack(head)
    limits = (MAX_HELLO_BYTES, 0) if is_hello else (MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)
    if header_bytes > limits[0] or payload_bytes > limits[1]:
        raise BadFrame(f"{header_bytes} and {payload_bytes} bytes are more than one of ours has")
    return header_bytes, payload_bytes


def parse(text: bytes | bytearray) -> Header:
    """A frame's header. Raises BadFrame."""
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"no header: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise BadFrame(f"a header that is a {type(header).__name__}")
    return cast(Header, header)


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
    header_bytes, payload_bytes = lengths_of(receive_exactly(connection, LENGTHS.size))
    return parse(receive_exactly(connection, header_bytes)), payload_bytes


def receive_hello(connection: socket.socket, deadline: float) -> Header:
    """The first frame of somebody unknown, whole by then (monotonic). Raises OSError."""
    head = _receive_until(connection, LENGTHS.size, deadline)
    header_bytes, _ = lengths_of(head, is_hello=True)
    return parse(_receive_until(connection, header_bytes, deadline))


def has_token(hello: Header, token: str) -> bool:
    """In constant time."""
    shown = hello.get("token")
    return isinstance(shown, str) and hmac.compare_digest(as_bytes(shown), as_bytes(token))


def as_bytes(text: str) -> bytes:
    """JSON can hold what no text can."""
    return text.encode(errors="surrogatepass")


def _receive_until(connection: socket.socket, size_bytes: int, deadline: float) -> bytes:
    content = b""
    while len(content) < size_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the first frame is late")
        connection.settimeout(left_s)
        if not (piece := connection.recv(size_bytes - len(content))):
            raise ConnectionClosed("the other side closed the connection")
        content += piece
    return content


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
