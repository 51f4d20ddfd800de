"""The worker's end of its link to the controller: reports out, commands in, and the lease."""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.protocol import wire

EXIT_WITHOUT_CONTROLLER = 71


class ControllerLink:
    """One TCP connection, read by a thread.

    `on_interrupt` is called in that thread with each `abort` and `pause`, at once; every other
    command waits in `commands` for the main thread. Without a word from the controller for
    `lease_s`, or when it closes the connection, the process ends itself: it would only compute
    what nobody counts.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str,
        worker: int,
        lease_s: float,
        on_interrupt: Callable[[dict[str, Any]], None],
    ) -> None:
        self.commands: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self.recorded_step = 0
        """Steps that the controller has put on record."""
        self.concluded_saves: dict[int, bool] = {}
        """Step -> whether its newest save was published."""
        self._connection = socket.create_connection(address, timeout=lease_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_interrupt = on_interrupt
        self._lock = threading.Lock()
        self.send("hello", role="worker", worker=worker, token=token)
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Report to the controller. A broken link is not the caller's concern: `_read` sees it."""
        frame = wire.pack({"type": kind, **fields}, payload)
        with self._lock:
            try:
                self._connection.sendall(frame)
            except OSError:
                time.sleep(0)  # the reading thread ends the process

    def _read(self) -> None:
        try:
            while True:
                header, payload = wire.receive(self._connection)
                if header["type"] == "word":
                    self.recorded_step = header["recorded_step"]
                    continue
                if header["type"] == "save_concluded":
                    self.concluded_saves[header["step"]] = header["is_published"]
                    continue
                if header["type"] in ("abort", "pause"):
                    self._on_interrupt(header)
                self.commands.put((header, bytes(payload)))
        except TimeoutError:
            reason = "no word from the controller within the lease"
        except (OSError, ConnectionError):
            reason = "the controller closed the link"
        print(f'leaving reason="{reason}"', file=sys.stderr, flush=True)
        os._exit(EXIT_WITHOUT_CONTROLLER)
