"""One copy of a rank's shard on the host, as of a step: its *own copy*.

When it is made, and where it goes, is client.py's.
"""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.layout import BlockSets, TensorLayout
from elastic.protocol.messages.backup import Slice
from workers.backup.shared import SharedArena
from workers.backup.store import Key, crc32
from workers.tensors.local import as_bytes, check_shard, local
from workers.train_state.owner import StateOwner
from workers.train_state.snapshot import Snapshot
from workers.train_state.train_state import TrainState


class BackupCopy:
    """This rank's shard after `step` steps, on the host once it is copied."""

    def __init__(
        self,
        key: Key,
        origin: int,
        by: StateOwner,
        train_state: TrainState,
        arena: SharedArena,
        lacks: BlockSets = (),
    ) -> None:
        """To be made between steps; origin: the generation that computed the step."""
        self.key, self.origin, self.at, self.arena = key, origin, by.position, arena
        self.lacks = lacks
        """Tensors of these blocks go to no holder. The client's thread alone changes it."""
        self.held_by: BackupAddress | None = None
        self.shared_with: BackupAddress | None = None
        """A holder that reads it where it is."""
        self.num_jobs = 0
        """That read it; under the client's lock."""
        self.layouts: list[TensorLayout] = []
        self.tensors: dict[str, Tensor] = {}
        self.sums: dict[str, int] = {}
        """A CRC-32 of each, made with the copy."""
        self._is_copied = threading.Event()

        def shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            self.layouts = [by.layout(name, tensor) for name, tensor in tensors.items()]
            return {name: local(tensor) for name, tensor in tensors.items()}

        self._snapshot = train_state.snapshot(shards, arena)
        self.state: dict[str, Any] = self._snapshot.header

    @property
    def is_held(self) -> bool:
        return self.held_by is not None

    def make(self) -> None:
        """In the client's thread."""
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

    def _sums(self) -> dict[str, int]:
        return {name: crc32(bytes_of(tensor)) for name, tensor in self.tensors.items()}

    def is_intact(self) -> bool:
        """Nothing has changed in memory since it was copied."""
        return self._sums() == self.sums

    def described(self) -> tuple[dict[str, Any], list[TensorLayout]]:
        """JSON part and tensors of the state."""
        return self.state, self.layouts

    def slices(self) -> tuple[Slice, ...]:
        """What goes to a holder. ValueError if a layout misdescribes what this rank has."""
        found, lacks = list[Slice](), frozenset(self.lacks)
        for layout in self.layouts:
            if layout.blocks in lacks:
                continue
            box, shard = layout.box(self.at), self.tensors[layout.name]
            check_shard(shard, layout, box)
            found.append(Slice(layout, box, shard.nbytes))
        return tuple(found)


def bytes_of(tensor: Tensor) -> memoryview:
    return as_bytes(tensor) if tensor.numel() else memoryview(b"")


def is_older(copy: BackupCopy, settled: tuple[int, int] | None) -> bool:
    """Whether a holder that has heard `settled` has dropped its copy."""
    return settled is not None and (copy.key.generation, copy.key.step) < settled
