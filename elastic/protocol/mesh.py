"""How the ranks of a generation share the model and the step: the mesh, as a value.

Who is a member is membership.py's; torch's own mesh is made from it in workers/parallel/.
"""

from dataclasses import dataclass

from elastic.protocol.membership import microbatch_ids

SHARDED = ("fsdp", "fsdp-grad-op")


def is_sharded(parallel: str) -> bool:
    """Whether a rank holds only its rows of the parameters and of the optimizer's state."""
    return parallel in SHARDED


def rows_of(num_rows: int, num_ranks: int, rank: int) -> range:
    """The rows of a tensor that `rank` of the shard axis holds, as FSDP2 cuts it: 8 over 3
    gives 3, 3, 2; 4 over 3 gives 2, 2, 0."""
    each = -(-num_rows // num_ranks)
    return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))


@dataclass(frozen=True, slots=True)
class Mesh:
    """One axis: the state is sharded over all ranks, or every rank holds it all ("ddp")."""

    parallel: str
    world_size: int

    def ids(self, num_microbatches: int, rank: int) -> range:
        """The micro-batches that `rank` computes, ascending.

        "fsdp": in round r the ranks compute ids r * world_size, r * world_size + 1, ..., which are
        neighbours in the canonical tree. Else a rank's ids are contiguous.
        """
        if self.parallel == "fsdp":
            return range(rank, num_microbatches, self.world_size)
        return microbatch_ids(num_microbatches, self.world_size, rank)

    def num_passes(self, num_microbatches: int, rank: int) -> int:
        """Forward and backward passes of `rank` in a step. Where every pass exchanges parameters,
        all make as many, and who has no id left makes an echo."""
        if self.parallel == "fsdp":
            return -(-num_microbatches // self.world_size)
        return len(self.ids(num_microbatches, rank))

    def rows(self, num_rows: int, rank: int) -> range:
        """The rows (elements of dim 0) of a sharded tensor that `rank` holds, as FSDP2 cuts it."""
        return rows_of(num_rows, self.world_size, rank)
