"""Who gets into a worker's server or a holder: whoever shows the run's token, first and soon.

What is said after the first frame is elsewhere; the controller's server is elastic/on_ray/links.py.
"""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from elastic.protocol import wire
from elastic.protocol.messages.hello import Hello, hello_in, other_version

MAX_STRANGERS = 64
"""Connections at a time that have not shown the token: the oldest one makes room for another."""
BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Of `accept`: later it works again."""
BUSY_S = 0.1
EXIT_WITHOUT_SERVER = 45
"""Status of a process that nobody can reach any more."""

Serve = Callable[[socket.socket, Hello], None]


def end_process(reason: str) -> None:
    """Its peers would wait for what it has; its end is a loss, which the controller learns of."""
    print(f'leaving reason="{reason}"', file=sys.stderr, flush=True)
    os._exit(EXIT_WITHOUT_SERVER)


class Admission:
    """A thread per connection: what one of them says, or does not say, is nothing to the others."""

    def __init__(self, listener: socket.socket, token: str, serve: Serve, name: str) -> None:
        """Listens from now on. serve: called in the connection's own thread, with its first frame;
        closes it. name: of the server."""
        self._listener, self._token, self._serve = listener, token, serve
        self._name, self._is_closed = name, False
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """Nobody is admitted any more."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._accept()
            except Exception as error:
                is_busy = isinstance(error, OSError) and error.errno in BUSY
                if not (is_busy or isinstance(error, RuntimeError)):  # no thread can be started
                    break
                time.sleep(BUSY_S)
        if not self._is_closed:
            end_process(f"the {self._name} can accept no connection any more")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._make_room()
        with self._lock:
            self._strangers[connection] = None
        try:
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._strangers.pop(connection, None)
            connection.close()
            raise

    def _make_room(self) -> None:
        with self._lock:
            while len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def _greet(self, connection: socket.socket) -> None:
        hello: Hello | None = None
        with suppress(OSError):
            hello = self._known(wire.receive_hello(connection, time.monotonic() + wire.HELLO_S))
        with self._lock:
            is_admitted = connection in self._strangers
            self._strangers.pop(connection, None)
        if hello is None or not is_admitted:
            connection.close()
            return
        connection.settimeout(None)  # whoever is admitted may be silent; its loss closes
        self._serve(connection, hello)

    def _known(self, header: wire.Header) -> Hello | None:
        """Who shows the token and speaks our version. Raises BadFrame."""
        if not wire.has_token(header, self._token):
            return None
        if why := other_version(header):
            print(
                f'{self._name} refused worker={header.get("worker")!r:.40} reason="{why}"',
                file=sys.stderr,
            )
            return None
        return hello_in(header)
