"""Who gets into a worker's server or a holder: whoever shows the run's token, first and soon.

What is said after the first frame is elsewhere; the controller's server is elastic/on_ray/links.py.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elastic.protocol import wire

MAX_STRANGERS = 64
"""Connections at a time that have not shown the token: the oldest one makes room for another."""
BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Of `accept`: later it works again."""
BUSY_S = 0.1

Serve = Callable[[socket.socket, wire.Header], None]


class Admission:
    """A thread per connection: what one of them says, or does not say, is nothing to the others."""

    def __init__(self, listener: socket.socket, token: str, serve: Serve) -> None:
        """serve: called in the connection's own thread, with its first frame; closes it."""
        self._listener, self._token, self._serve = listener, token, serve
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in BUSY:
                    return
                time.sleep(BUSY_S)
                continue
            self._make_room()
            with self._lock:
                self._strangers[connection] = None
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _make_room(self) -> None:
        with self._lock:
            while len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _greet(self, connection: socket.socket) -> None:
        hello: wire.Header | None = None
        with suppress(OSError):
            hello = wire.receive_hello(connection, time.monotonic() + wire.HELLO_S)
        with self._lock:
            is_known = hello is not None and wire.has_token(hello, self._token)
            is_admitted = connection in self._strangers and is_known
            self._strangers.pop(connection, None)
        if hello is None or not is_admitted:
            connection.close()
            return
        connection.settimeout(None)  # whoever is admitted may be silent; its loss closes
        self._serve(connection, hello)
