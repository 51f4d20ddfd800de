"""Where a member stands, for tests of peer memory without members."""

from collections.abc import Callable
from dataclasses import dataclass

from elastic.protocol.mesh import Mesh, Parallel


@dataclass
class Place:
    generation: int
    rank: int = 0
    world_size: int = 1
    rows_of: Callable[[int, int], Mesh] = lambda rank, world_size: Mesh(
        Parallel("fsdp"), world_size
    )
    """A strategy's `mesh_of_rows`."""

    @property
    def mesh(self) -> Mesh:
        return Mesh(Parallel("fsdp"), self.world_size)

    @property
    def mesh_of_rows(self) -> Mesh:
        return self.rows_of(self.rank, self.world_size)
