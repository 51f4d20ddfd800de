"""What somebody on the network without a token may try at the servers of a run."""

import os
import random
import socket
import threading
from contextlib import suppress
from pathlib import Path

from elastic.protocol import wire
from elastic.protocol.messages.direction import header_of, pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.store import Set

LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""
NUM_SILENT = 300
"""Connections at a time that say nothing, per server."""
HUGE = 2**62


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """The addresses at which these processes can be reached."""
    ours: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            ours |= {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found: list[tuple[str, int]] = []
    for row in rows:
        if row[3] == LISTENS and f"socket:[{row[9]}]" in ours:
            host, port = row[1].split(":")
            octets = [str(b) for b in reversed(bytes.fromhex(host))]
            found.append((".".join(octets), int(port, 16)))
    return found


def frames() -> list[bytes]:
    """First words that are none of ours, or announce more than anybody has."""
    nested = b"[" * 100_000
    wrong = pack(Hello("guessed", worker=0, role="worker"))
    return [
        wrong,
        wrong + pack(Set("0/0", b"mine")),
        wire.pack({**header_of(Hello("")), "token": ["a", "list"], "worker": []}),
        wire.LENGTHS.pack(len(nested), 0) + nested,
        wire.LENGTHS.pack(2**32 - 1, HUGE),
        wire.LENGTHS.pack(2, HUGE) + b"{}",
        random.Random(1).randbytes(100_000),
        b"GET / HTTP/1.1\r\n\r\n",
    ]


class Strangers:
    """They come again and again while the block runs."""

    def __init__(self, pids_of_run) -> None:
        self._pids_of_run = pids_of_run
        self._is_over = threading.Event()
        self.num_tried = 0
        self._threads = [
            threading.Thread(target=self._shout, daemon=True),
            threading.Thread(target=self._crowd, daemon=True),
        ]

    def __enter__(self) -> "Strangers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _shout(self) -> None:
        while not self._is_over.is_set():
            for place in listening(self._pids_of_run()):
                for frame in frames():
                    with suppress(OSError), socket.create_connection(place, 2) as connection:
                        connection.sendall(frame)
                        self.num_tried += 1

    def _crowd(self) -> None:
        while not self._is_over.is_set():
            crowd: list[socket.socket] = []
            for place in listening(self._pids_of_run()):
                for _ in range(NUM_SILENT):
                    with suppress(OSError):
                        crowd.append(socket.create_connection(place, 2))
            self.num_tried += len(crowd)
            self._is_over.wait(1.0)  # they hold their places for so long
            for connection in crowd:
                connection.close()
