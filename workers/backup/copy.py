"""One copy of a rank's shard on the host, as of a step: the *shadow*.

When it is made, and where it goes, is client.py's.
"""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.mesh import Mesh
from elastic.protocol.messages.backup import Slice
from workers.backup.shared import SharedArena
from workers.backup.store import Key, crc32
from workers.parallel.shards import TensorLayout, kinds_of
from workers.train_state.snapshot import Snapshot
from workers.train_state.tensors import as_bytes, local
from workers.train_state.train_state import TrainState


class BackupCopy:
    """This rank's shard after `step` steps, on the host once it is copied."""

    def __init__(
        self, key: Key, origin: int, mesh: Mesh, train_state: TrainState, arena: SharedArena
    ) -> None:
        """To be made between steps; origin: the generation that computed the step."""
        self.key, self.origin, self.mesh, self.arena = key, origin, mesh, arena
        self.held_by: BackupAddress | None = None
        self.shared_with: BackupAddress | None = None
        """A holder that reads it where it is."""
        self.num_jobs = 0
        """That read it; under the keeper's lock."""
        self.kinds: list[TensorLayout] = []
        self.tensors: dict[str, Tensor] = {}
        self.sums: list[int] = []
        """A CRC-32 of each, made with the copy."""
        self._is_copied = threading.Event()
        self._snapshot = train_state.snapshot(self._rows, arena)
        self.state: dict[str, Any] = self._snapshot.header

    def _rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.kinds = kinds_of(tensors)
        return {name: local(t) for name, t in tensors.items()}

    @property
    def is_held(self) -> bool:
        return self.held_by is not None

    def copy(self) -> None:
        """In the keeper's thread."""
        snapshot: Snapshot = self._snapshot
        self.arena.reserve(snapshot.shapes.values())
        for name in snapshot.shapes:
            self.tensors[name] = snapshot.take(name)
        self.sums = self._sums()
        self._is_copied.set()

    def finish(self, timeout_s: float) -> bool:
        """Whether it is copied, at latest after `timeout_s`."""
        self._snapshot.settle()
        return self._is_copied.wait(timeout_s)

    def _sums(self) -> list[int]:
        return [crc32(bytes_of(tensor)) for tensor in self.tensors.values()]

    def is_intact(self) -> bool:
        """Nothing has changed in memory since it was copied."""
        return self._sums() == self.sums

    def described(self) -> tuple[dict[str, Any], list[TensorLayout]]:
        """JSON part and tensors of the state."""
        return self.state, self.kinds

    def slices(self) -> list[Slice]:
        found: list[Slice] = []
        for kind in self.kinds:
            rows = kind.rows(self.mesh, self.key.rank)
            dtype = str(kind.dtype).removeprefix("torch.")
            size_bytes = self.tensors[kind.name].nbytes
            piece = (kind.is_sharded, rows.start, len(rows), size_bytes)
            found.append(Slice(kind.name, dtype, kind.shape, *piece))
        return found


def bytes_of(tensor: Tensor) -> memoryview:
    return as_bytes(tensor) if tensor.numel() else memoryview(b"")


def is_older(shadow: BackupCopy, settled: tuple[int, int] | None) -> bool:
    """Whether a holder that has heard `settled` has dropped its copy."""
    return settled is not None and (shadow.key.generation, shadow.key.step) < settled
