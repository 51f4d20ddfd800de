"""A holder that is frozen: its kernel takes connections and bytes, and nothing is answered."""

import socket

from elastic.protocol.backup_assignment import BackupAddress


class FrozenHolder:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = BackupAddress("node0", *self._listener.getsockname())

    def close(self) -> None:
        """It is killed: its kernel resets what is open."""
        self._listener.close()
