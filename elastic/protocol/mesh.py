"""How the ranks of a generation share the model and the step: the mesh, as a value.

Who is a member is membership.py's; torch's own mesh is made from it in workers/parallel/.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.protocol.membership import microbatch_ids

SHARDED = ("fsdp", "fsdp-grad-op")
HYBRID = re.compile(r"hsdp:([1-9]\d*)")


def is_sharded(parallel: str) -> bool:
    """Whether a rank holds only its rows of the parameters and of the optimizer's state."""
    return parallel in SHARDED or is_hybrid(parallel)


def is_hybrid(parallel: str) -> bool:
    """Whether several groups of ranks ("replicas") may hold all rows each."""
    return HYBRID.fullmatch(parallel) is not None


def rows_of(num_rows: int, num_ranks: int, rank: int) -> range:
    """The rows of a tensor that `rank` of the shard axis holds, as FSDP2 cuts it: 8 over 3
    gives 3, 3, 2; 4 over 3 gives 2, 2, 0."""
    each = -(-num_rows // num_ranks)
    return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))


@dataclass(frozen=True, slots=True)
class Mesh:
    """A shard axis of `num_shards` ranks and a replica axis of `num_replicas`; "ddp" has no shards,
    "fsdp" no replicas. Ranks behind the last whole replica stand by: they compute and hold nothing.
    """

    parallel: str
    world_size: int
    order: tuple[int, ...] = ()
    """Of each rank the position in the mesh, replica by replica; empty: its rank."""

    @property
    def num_shards(self) -> int:
        hybrid = HYBRID.fullmatch(self.parallel)
        if hybrid is not None:
            return min(int(hybrid[1]), self.world_size)
        return self.world_size if self.parallel in SHARDED else 1

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.num_shards

    @property
    def num_active(self) -> int:
        """Ranks that do not stand by."""
        return self.num_replicas * self.num_shards

    def position(self, rank: int) -> int:
        return self.order[rank] if self.order else rank

    def is_standby(self, rank: int) -> bool:
        return self.position(rank) >= self.num_active

    def shard(self, rank: int) -> int:
        """Where on the shard axis."""
        return self.position(rank) % self.num_shards

    def replica(self, rank: int) -> int:
        """Where on the replica axis."""
        return self.position(rank) // self.num_shards

    def ranks(self) -> list[int]:
        """By position: those that do not stand by come first, replica by replica."""
        return sorted(range(self.world_size), key=self.position)

    def replica_of(self, rank: int) -> list[int]:
        """The ranks of this rank's replica, by shard. Not for one that stands by."""
        first = self.replica(rank) * self.num_shards
        return self.ranks()[first : first + self.num_shards]

    def holders_of(self, shard: int) -> list[int]:
        """The ranks that hold the rows of `shard`, by replica."""
        return self.ranks()[shard : self.num_active : self.num_shards]

    def ids_of_replica(self, num_microbatches: int, replica: int) -> range:
        return microbatch_ids(num_microbatches, self.num_replicas, replica)

    def ids(self, num_microbatches: int, rank: int) -> range:
        """The micro-batches that `rank` computes, ascending.

        Where every pass exchanges parameters, the ranks of a replica compute neighbours in the
        canonical tree in each round. Else a rank's ids are contiguous.
        """
        if not self._has_rounds:
            return microbatch_ids(num_microbatches, self.world_size, rank)
        if self.is_standby(rank):
            return range(0)
        ids = self.ids_of_replica(num_microbatches, self.replica(rank))
        return ids[self.shard(rank) :: self.num_shards]

    def num_passes(self, num_microbatches: int, rank: int) -> int:
        """Forward and backward passes of `rank` in a step. Where every pass exchanges parameters,
        all of a replica make as many, and who has no id left serves the others."""
        if not self._has_rounds:
            return len(self.ids(num_microbatches, rank))
        if self.is_standby(rank):
            return 0
        ids = self.ids_of_replica(num_microbatches, self.replica(rank))
        return -(-len(ids) // self.num_shards)

    def rows(self, num_rows: int, rank: int) -> range:
        """The rows (elements of dim 0) of a sharded tensor that `rank` holds, as FSDP2 cuts it."""
        if self.is_standby(rank):
            return range(0)
        return rows_of(num_rows, self.num_shards, self.shard(rank))

    def own_rows(self, num_rows: int, rank: int) -> range:
        """What of them nobody before it in the mesh holds: each row is one rank's own."""
        return self.rows(num_rows, rank) if self.replica(rank) == 0 else range(0)

    @property
    def _has_rounds(self) -> bool:
        return self.parallel == "fsdp" or is_hybrid(self.parallel)


def placed(mesh: Mesh, nodes: Sequence[str]) -> Mesh:
    """`mesh` with its replicas inside of nodes as far as possible.

    nodes: by rank. What is left of the nodes makes replicas across them, then stands by.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    whole: list[int] = []
    rest: list[int] = []
    for ranks in by_node.values():
        count = len(ranks) - len(ranks) % mesh.num_shards
        whole += ranks[:count]
        rest += ranks[count:]
    order = [0] * mesh.world_size
    for position, rank in enumerate(whole + rest):
        order[rank] = position
    is_plain = order == list(range(mesh.world_size))
    return Mesh(mesh.parallel, mesh.world_size, () if is_plain else tuple(order))
