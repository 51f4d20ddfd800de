"""Over which ranks that are processes meet and send parts of collectives: keys that are waited for.

torch's TCPStore would do, but asks the name service for the name of whoever connects, and where it
loses a question each connection waits for 5 s.
"""

import threading
from multiprocessing.connection import Client, Connection, Listener


class PartsServer:
    """In the test's own process, until that ends."""

    def __init__(self) -> None:
        self._listener = Listener(family="AF_UNIX", backlog=64)
        self.address = str(self._listener.address)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="parts", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                key, value, timeout_s = connection.recv()
                with self._changed:
                    if value is not None:
                        self._values[key] = value
                        self._changed.notify_all()
                        continue
                    self._changed.wait_for(lambda key=key: key in self._values, timeout_s)
                connection.send_bytes(self._values.get(key, b""))
        except (EOFError, OSError):
            connection.close()  # its process has ended


class Parts:
    """A connection, of one thread."""

    def __init__(self, address: str, name: str = "", timeout_s: float = 20.0) -> None:
        """name: of the group; keys of others are others."""
        self._connection, self._name, self._timeout_s = Client(address), name, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        assert content
        self._connection.send((f"{self._name}/{key}", content, 0.0))

    def get(self, key: str) -> bytes:
        """TimeoutError if nobody has set it for so long."""
        self._connection.send((f"{self._name}/{key}", None, self._timeout_s))
        value = self._connection.recv_bytes()
        if not value:
            raise TimeoutError(key)
        return value
