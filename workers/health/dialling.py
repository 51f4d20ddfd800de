"""Which addresses can be reached from here: a TCP connection to each, closed at once.

Standard library only: the pulse dials.
"""

import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

Address = tuple[str, int]
TRIES = (0.0, 0.4, 0.4)
"""When connections begin, in parts of the time there is: the kernel itself tries again after a
second only, and a packet may be lost."""


def reached(addresses: Mapping[str, Address], timeout_s: float) -> set[str]:
    """Names of those to which a connection came about within `timeout_s`."""
    begun, found = time.monotonic(), set[str]()
    open_: dict[socket.socket, str] = {}
    try:
        for i, part in enumerate(TRIES):
            _settle(open_, found, begun + part * timeout_s)
            for name, address in addresses.items():
                if name not in found:
                    with suppress(OSError):  # no route: as good as no answer
                        open_[_begin(address)] = name
            is_last = i == len(TRIES) - 1
            _settle(open_, found, begun + timeout_s if is_last else time.monotonic())
    finally:
        for connection in open_:
            connection.close()
    return found


def _begin(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(address)
    except BlockingIOError:
        pass
    except OSError:
        connection.close()
        raise
    return connection


def _settle(open_: dict[socket.socket, str], found: set[str], until: float) -> None:
    """Hear what becomes of the connections, until all have answered or it is late."""
    while open_:
        left_s = max(0.0, until - time.monotonic())
        done = _connected(open_, left_s)
        for connection in done:
            name = open_.pop(connection)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.add(name)
            connection.close()
        for connection in [c for c, name in open_.items() if name in found]:
            del open_[connection]
            connection.close()
        if not done:
            return


def _connected(connections: Iterable[socket.socket], limit_s: float) -> list[socket.socket]:
    """Those whose connecting has ended, once there are any. Whatever number their files have:
    select() takes the first 1,024 of a process only."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_WRITE, connection)
        return [key.data for key, _ in selector.select(limit_s)]
