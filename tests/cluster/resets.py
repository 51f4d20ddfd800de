"""All TCP connections of some processes break at once, as when a firewall forgets them."""

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

PIDFD_GETFD = 438
"""The system call's number, which Python does not have; the same on every architecture."""
AF_UNSPEC = struct.pack("H14x", socket.AF_UNSPEC)
libc = ctypes.CDLL(None, use_errno=True)


def descendants(pid: int) -> list[int]:
    """Processes that `pid` and its children have started and that live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found, newest = [], [pid]
    while newest:
        newest = [child for child, parent in parents.items() if parent in newest]
        found += newest
    return found


def reset_connections(pids: list[int]) -> int:
    """How many were. Both ends are told; whoever listens goes on doing so. PermissionError where
    this machine does not let us."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):
            handle = os.pidfd_open(pid)
            try:
                count += sum(reset(handle, fd) for fd in sockets_of(pid))
            finally:
                os.close(handle)
    return count


def sockets_of(pid: int) -> list[int]:
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(entry.path).startswith("socket:"):
                found.append(int(entry.name))
    return found


def reset(process: int, fd: int) -> bool:
    """False if it is no TCP connection."""
    ours = libc.syscall(PIDFD_GETFD, process, fd, 0)
    if ours < 0:
        if ctypes.get_errno() == 1:
            raise PermissionError("pidfd_getfd(2) is not permitted")
        return False
    with socket.socket(fileno=ours) as connection:
        is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or connection.type != socket.SOCK_STREAM:
            return False
        try:
            connection.getpeername()
        except OSError:
            return False  # it listens
        return libc.connect(ours, AF_UNSPEC, len(AF_UNSPEC)) == 0  # tcp_disconnect: a reset
