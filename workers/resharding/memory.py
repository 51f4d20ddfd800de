"""Where a rank's shards are, and those of the next generation will be: an allocator that resharding
is given.

Shipped are `PlainMemory`, which is torch's, and host_memory.py's for shards on the host.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from elastic.protocol.layout import Position, TensorLayout
from workers.tensors.local import dtype_of


class ShardMemory(Protocol):
    """Room for the shards of one state."""

    device: torch.device
    """Which sends and receives them."""
    can_reuse: bool
    """It is worth giving all shards up at once, where copies of them are at hand: the next ones
    come to lie where they were."""

    @property
    def is_used(self) -> bool:
        """Shards lie in it that can only be given up all at once."""
        ...

    def take(self, layouts: Sequence[TensorLayout], to: Position) -> dict[str, Tensor]:
        """A position's box of every tensor, undefined. Nobody needs the shards of before: what
        still refers to them reads something else then, as after an optimizer step."""
        ...

    def take_one(self, layout: TensorLayout, to: Position) -> Tensor:
        """Beside the shards that are there."""
        ...

    def vacate(self) -> None:
        """All shards have been given up, and the next ones are about to be taken."""
        ...

    def drop(self, shards: Iterable[Tensor]) -> None:
        """Nobody needs these any more; they may be elsewhere."""
        ...

    def beside(self) -> "ShardMemory":
        """Room for another state while this one is kept."""
        ...


class PlainMemory:
    """As torch allocates."""

    can_reuse = is_used = False

    def __init__(self, device: torch.device, host: torch.device | None = None) -> None:
        """host: where shards are, if `device` is not to hold them: they pass through it a few at a
        time."""
        self.device, self._host = device, host or device

    def take(self, layouts: Sequence[TensorLayout], to: Position) -> dict[str, Tensor]:
        return {layout.name: self.take_one(layout, to) for layout in layouts}

    def take_one(self, layout: TensorLayout, to: Position) -> Tensor:
        return torch.empty(layout.box(to).shape, dtype=dtype_of(layout), device=self._host)

    def vacate(self) -> None:
        pass

    def drop(self, shards: Iterable[Tensor]) -> None:
        pass

    def beside(self) -> "PlainMemory":
        return self
