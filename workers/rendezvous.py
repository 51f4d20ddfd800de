"""The rendezvous: one torch store per generation, so that a dead generation's keys die with it.

Lives in its own small Ray actor (elastic/on_ray/actors.py), outside trainers and controller.
"""

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Rendezvous:
    """Hosts the store of the newest generation; the store before it is closed."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._store: TCPStore | None = None
        self._generation = 0

    def open(self, generation: int) -> tuple[str, int]:
        """The address of the store of `generation`, which must not be older than the last one."""
        if self._store is None or generation != self._generation:
            assert generation > self._generation, (generation, self._generation)
            self._store = TCPStore(self.host, 0, None, True, wait_for_workers=False)
            self._generation = generation
        return self.host, self._store.port

    def forget(self) -> None:
        """A new controller has taken over: what it does not know of may be in the newest store."""
        self._store, self._generation = None, 0
