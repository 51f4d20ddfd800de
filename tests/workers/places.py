"""Where a member stands, for tests of peer memory and of checkpoints without members."""

from collections.abc import Callable
from dataclasses import dataclass

from elastic.protocol.layout import Position
from elastic.protocol.mesh import Mesh, Parallel
from workers.tensors.local import layout_of


@dataclass
class Place:
    generation: int
    rank: int = 0
    world_size: int = 1
    position_of: Callable[[int, int], Position] = lambda rank, world_size: Position(
        Mesh(Parallel("fsdp"), world_size), rank
    )
    """A strategy's `position`."""
    layout = staticmethod(layout_of)
    """Every strategy's, as yet."""

    @property
    def position(self) -> Position:
        return self.position_of(self.rank, self.world_size)
