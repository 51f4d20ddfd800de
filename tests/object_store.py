"""A real S3 server for tests (moto's, in a process of its own), and a proxy before it that fails.

What is tested with them is in tests/store and tests/cluster.
"""

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
START_S = 120.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
ERROR_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
MAX_HEAD_BYTES = 1 << 16


class S3Server:
    """moto's server on a free loopback port. Use as a context manager."""

    def __enter__(self) -> "S3Server":
        self._start()
        deadline = time.monotonic() + START_S
        while (has_ended := self._process.poll() is not None) or not answers(self.port):
            assert time.monotonic() < deadline, f"moto's server did not answer in {START_S} s"
            if has_ended:
                self._start()  # somebody else had taken the port meanwhile
            time.sleep(0.05)  # polling, bounded by the deadline
        return self

    def _start(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ.copy()
        )

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        request(self.port, name, "PUT")
        return name


def request(port: int, path: str, method: str, body: bytes | None = None) -> bytes:
    """One unsigned request; moto does not check signatures."""
    asked = urllib.request.Request(f"http://{HOST}:{port}/{path}", data=body, method=method)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    try:
        request(port, "moto-api/", "GET")
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def uri(bucket: str, path: str, port: int) -> str:
    query = f"endpoint_override={HOST}:{port}&scheme=http&region=us-east-1"
    return f"s3://{bucket}/{path}?{query}"


@dataclass
class Faults:
    """What the proxy does to connections; a test changes it at any time."""

    errors: float = 0
    """So many of the next requests are answered with 500."""
    cut_upload_after: int | None = None
    """Connections break once a request's body has passed so many bytes."""
    bytes_per_s: float | None = None
    is_unreachable: bool = False
    """Connections are closed before a word."""
    is_silent: bool = False
    """Requests are taken and never answered."""
    only: str = ""
    """Only requests whose first line contains it; all if it is empty."""

    def heal(self) -> None:
        self.errors, self.cut_upload_after, self.bytes_per_s = 0, None, None
        self.is_unreachable, self.is_silent, self.only = False, False, ""


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection may break after its test, while the next one reads the standard error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class FaultProxy:
    """A TCP proxy that knows where an HTTP request begins. One connection, one request: every
    request is told to close. Use as a context manager."""

    def __init__(self, upstream_port: int) -> None:
        self.faults = Faults()
        self.seen: list[str] = []
        """The first line of every request."""
        proxy = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._pass(self.request, upstream_port)

        self._server = _Listener((HOST, 0), Connection)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _pass(self, client: socket.socket, upstream_port: int) -> None:
        if self.faults.is_unreachable:
            return
        head, rest = read_head(client)
        if not head:
            return
        line = head.split(b"\r\n", 1)[0].decode()
        self.seen.append(line)
        while self.faults.is_silent and client.recv(1 << 16):
            pass  # until the client has had enough
        is_meant = self.faults.only in line
        if is_meant and self.faults.errors > 0:
            self.faults.errors -= 1
            swallow(client, head, rest)
            client.sendall(ERROR_500)
            return
        with socket.create_connection((HOST, upstream_port), timeout=30) as server:
            back = threading.Thread(target=self._back, args=(server, client), daemon=True)
            back.start()
            server.sendall(head)
            if self._forward(client, server, rest, is_meant):
                back.join(60)

    def _forward(
        self, client: socket.socket, server: socket.socket, rest: bytes, is_meant: bool
    ) -> bool:
        """The body, until the client is done; False if it was cut."""
        count, piece = 0, rest
        while True:
            count += len(piece)
            faults = self.faults
            limit = faults.cut_upload_after if is_meant else None
            if faults.is_unreachable or (limit is not None and count > limit):
                return False
            if is_meant and faults.bytes_per_s:
                time.sleep(len(piece) / faults.bytes_per_s)  # this is the fault
            try:
                server.sendall(piece)
                piece = client.recv(1 << 16)
            except OSError:
                return False
            if not piece:
                return True

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while piece := server.recv(1 << 16):
                client.sendall(piece)
            client.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # either side is gone


def read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The request's head, told to close the connection afterwards, and the body's beginning."""
    content = b""
    while b"\r\n\r\n" not in content and len(content) < MAX_HEAD_BYTES:
        piece = client.recv(1 << 16)
        if not piece:
            return b"", b""
        content += piece
    head, _, rest = content.partition(b"\r\n\r\n")
    lines = [x for x in head.split(b"\r\n") if not x.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n", rest


def swallow(client: socket.socket, head: bytes, rest: bytes) -> None:
    """Read the body of a request that is refused, or the client sees a reset instead of a 500."""
    sizes = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
    left = int(sizes[0].partition(b":")[2]) - len(rest) if sizes else 0
    if b"expect: 100-continue" in head.lower():
        return
    while left > 0 and (piece := client.recv(min(left, 1 << 16))):
        left -= len(piece)
