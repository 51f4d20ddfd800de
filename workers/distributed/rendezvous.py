"""The rendezvous: what the members of one generation say of themselves before they are connected.

Lives in its own small Ray actor (elastic/on_ray/actors.py), outside trainers and controller. A
generation has its own server and secret, so that a dead generation's keys die with it and nobody
but its members reads or writes them: torch's TCPStore answers whoever connects.
"""

import secrets
import socket
import threading
from contextlib import suppress

from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.store import TO_STORE, Get, Set, Value, Welcome
from workers.distributed.admission import Admission

MAX_VALUE_BYTES = 2**20
"""Of one key: an address of gloo's or an id of NCCL's has less than a thousand."""


class StoreServer:
    """The keys and values of one generation, in the order in which they were set.

    What members say and are told is in elastic/protocol/messages/store.py."""

    def __init__(self, host: str) -> None:
        """host: the address that members reach, and the only one listened on."""
        self.secret = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._log: list[tuple[str, bytes]] = []
        self._is_set: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._members: set[socket.socket] = set()
        self._is_closed = False
        self._admission = Admission(self._listener, self.secret, self._serve, "store")

    def close(self) -> None:
        self._admission.close()
        with self._lock:
            self._is_closed = True
            for is_set in self._is_set.values():
                is_set.set()
            for connection in self._members:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _serve(self, connection: socket.socket, _hello: Hello) -> None:
        with self._lock:
            self._members.add(connection)
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(pack(Welcome()))
            while not self._is_closed:
                self._answer(connection)
        with self._lock:
            self._members.discard(connection)

    def _answer(self, connection: socket.socket) -> None:
        header, value_bytes = wire.receive_header(connection)
        if value_bytes > MAX_VALUE_BYTES:
            raise wire.BadFrame(f"{value_bytes} bytes are more than a value has")
        match TO_STORE.read(header, wire.receive_exactly(connection, value_bytes)):
            case Set(key, value):
                self._set(str(key), value)
            case Get(key, seen):
                connection.sendall(self._since(str(key), int(seen)))

    def _set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._log.append((key, value))
            self._is_set.setdefault(key, threading.Event()).set()

    def _since(self, key: str, seen: int) -> bytes:
        """Raises ConnectionError if the generation is over first."""
        with self._lock:
            is_set = self._is_set.setdefault(key, threading.Event())
            if self._is_closed:
                is_set.set()
        is_set.wait()
        if self._is_closed:
            raise wire.ConnectionClosed("the generation is over")
        with self._lock:
            news = self._log[seen:]
        last = len(news) - 1
        return b"".join(pack(Value(k, i == last, v)) for i, (k, v) in enumerate(news))


class Rendezvous:
    """Hosts the store of the newest generation; the store before it is closed."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._store: StoreServer | None = None
        self._generation = 0

    def open(self, generation: int) -> tuple[str, int, str]:
        """Host, port and secret of `generation`'s store; it must not be older than the last one."""
        if self._store is None or generation != self._generation:
            assert generation > self._generation, (generation, self._generation)
            self.forget()
            self._store, self._generation = StoreServer(self.host), generation
        return self.host, self._store.port, self._store.secret

    def forget(self) -> None:
        """A new controller has taken over: what it does not know of may be in the newest store."""
        if self._store is not None:
            self._store.close()
        self._store, self._generation = None, 0
