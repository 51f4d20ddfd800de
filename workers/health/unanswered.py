"""Which hosts leave unanswered what a process sends them, as the kernel's own tables of its TCP
connections tell (proc(5): net/tcp). Nothing is sent for it.

A path that is cut says nothing by itself, and only the two at its ends can know. Standard library
only: the pulse uses it.
"""

import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

ESTABLISHED, SYN_SENT = "01", "02"
RETRANSMITS = "01"
"""The timer that runs."""
UNANSWERED = 2
"""So often the kernel has sent the same bytes again: the first time after 0.2 s or more, and after
twice as long each time (RFC 6298); a lost packet now and then is answered at the first."""
TCP_INFO = struct.Struct("BBB")
"""Its first fields: state, congestion state, retransmits."""
SOCKET = re.compile(r"socket:\[(\d+)\]")


def unanswered(pid: int) -> set[str]:
    """Addresses of the hosts. Empty where the system does not tell."""
    found: set[str] = set()
    try:
        sockets = set(_sockets_of(pid))
        for name in ("tcp", "tcp6"):
            table = Path(f"/proc/{pid}/net/{name}")
            lines = table.read_text().splitlines()[1:] if table.exists() else []
            found |= {host for inode, host in map(_waits_for, lines) if host and inode in sockets}
    except OSError:
        pass  # the process is gone, or this is no Linux
    return found


def _sockets_of(pid: int) -> Iterator[str]:
    """Their inodes."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            match = SOCKET.fullmatch(os.readlink(entry.path))
        except OSError:
            continue  # closed meanwhile
        if match:
            yield match[1]


def _waits_for(line: str) -> tuple[str, str]:
    """Inode, and the other end's host if it does not answer."""
    _, _, remote, state, _, timer, retransmits, _, _, inode, *_ = line.split()
    is_sending = timer.partition(":")[0] == RETRANSMITS and int(retransmits, 16) >= UNANSWERED
    if state not in (ESTABLISHED, SYN_SENT) or not is_sending:
        return inode, ""
    return inode, _host(remote.partition(":")[0])


def _host(text: str) -> str:
    """Words of 32 bits in the machine's order; an IPv4 host as such also in an IPv6 connection."""
    words = (text[at : at + 8] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(b"".join(int(w, 16).to_bytes(4, sys.byteorder) for w in words))
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return str(address)


class Unanswered:
    """For how long what was sent over a connection has been sent again and again, in vain."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._since: float | None = None

    def look(self, connection: socket.socket, now: float) -> float:
        """Seconds; 0.0 where the system does not tell. Raises OSError if it is closed."""
        is_same, self._connection = connection is self._connection, connection
        if not retransmits(connection) >= UNANSWERED:
            self._since = None
        elif not is_same or self._since is None:
            self._since = now
        return 0.0 if self._since is None else now - self._since


def retransmits(connection: socket.socket) -> int:
    """How often the same bytes have been sent again (tcp(7): TCP_INFO). Raises OSError."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    return TCP_INFO.unpack(info)[2] if len(info) == TCP_INFO.size else 0


class Silences:
    """Since when hosts have not answered, over several looks."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, pid: int, now: float) -> dict[str, float]:
        """Host -> seconds, of all that do not answer now and did not at the looks before."""
        self._since = {host: self._since.get(host, now) for host in unanswered(pid)}
        return {host: round(now - since, 3) for host, since in sorted(self._since.items())}

    def forget(self) -> None:
        self._since.clear()
