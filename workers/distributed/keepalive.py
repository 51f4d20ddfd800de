"""A connection whose other host is gone fails, also where nothing is being sent."""

import socket

UNKNOWN_S = 60.0
"""Without detect_s: how long a host at the other end may be silent."""
UNREAD = 10
"""Times as long a follower may leave unread what it is sent: its process may be busy."""


def watch_host(connection: socket.socket, detect_s: float | None, *, is_sender: bool) -> None:
    """Have the connection fail once the other host has not answered for about detect_s: a link
    that is cut says nothing by itself. Kernels answer, for processes that are frozen as well."""
    silent_s = UNKNOWN_S if detect_s is None else detect_s
    probe_s = max(1, round(silent_s / 3))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if is_sender:  # what is on the wire keeps the kernel from probing
        unread_ms = round(1000 * UNREAD * silent_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
