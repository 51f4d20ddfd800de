"""The store of a generation as torch's backends ask for it (workers/distributed/rendezvous.py has
its other end). gloo and NCCL set what a rank listens on, and get the others'."""

import select
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  (no __all__)

from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.store import FROM_STORE, Get, Set, Value

AGAIN_S = 0.05
LOOK_S = 0.05
"""Between two looks at whether somebody still wants to know."""


class StoreClient(Store):
    """One member's connection. Whatever thread a backend calls it from, one call is done at a time:
    a key that this rank itself sets is set before it is waited for."""

    def __init__(
        self,
        address: Sequence[Any],
        timeout_s: float,
        given_up: threading.Event | None = None,
    ) -> None:
        """address: host, port and secret. given_up: ends every wait. Raises OSError if nobody
        listens there, or lets this one in within timeout_s."""
        super().__init__()
        self._timeout_s, self._given_up = timeout_s, given_up or threading.Event()
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._num_seen = 0
        self._connection = connect(address, time.monotonic() + timeout_s)

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._connection.sendall(pack(Set(key, content)))

    def get(self, key: str) -> bytes:
        """Waits until somebody has set it. Raises OSError: late, or the generation is over."""
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            for key in keys:
                if key not in self._values:
                    self._learn(key, deadline)

    def check(self, keys: Sequence[str]) -> bool:
        """Of what this rank has been told: no backend asks before it waits."""
        return all(key in self._values for key in keys)

    def _learn(self, key: str, deadline: float) -> None:
        self._connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._connection.sendall(pack(Get(key, self._num_seen)))
        is_last = False
        while not is_last:
            self._await_word(deadline)
            told = FROM_STORE.read(*wire.receive(self._connection))
            if not isinstance(told, Value):
                raise wire.BadFrame("a value was asked for")
            self._values[told.key] = told.payload
            self._num_seen += 1
            is_last = told.is_last

    def _await_word(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(1000 * LOOK_S) and time.monotonic() < deadline:
            if self._given_up.is_set():
                raise ConnectionAbortedError("the generation was given up")


def connect(address: Sequence[Any], deadline: float) -> socket.socket:
    """As somebody who is let in. Where many come at once, some may be sent away before their secret
    is read (workers/distributed/admission.py): they come again."""
    host, port, secret = address
    while True:
        left_s = max(0.001, deadline - time.monotonic())
        connection = socket.create_connection((host, port), left_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(pack(Hello(secret)))
            FROM_STORE.read(*wire.receive(connection))
            return connection
        except ConnectionError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)
