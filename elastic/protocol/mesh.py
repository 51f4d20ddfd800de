"""How the ranks of a generation share the model and the step: the mesh, as a value.

Who is a member is membership.py's; torch's own mesh is made from it in workers/parallel/.
"""

from dataclasses import dataclass

from elastic.protocol.membership import microbatch_ids

SHARDED = ("fsdp", "fsdp-grad-op")


def is_sharded(parallel: str) -> bool:
    """Whether a rank holds only its rows of the parameters and of the optimizer's state."""
    return parallel in SHARDED


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

    def num_passes(self, num_microbatches: int) -> int:
        """Forward and backward passes of every sharded rank, echoes included."""
        return -(-num_microbatches // self.world_size)

    def rows(self, num_rows: int, rank: int) -> range:
        """The rows (elements of dim 0) of a sharded tensor that `rank` holds, as FSDP2 cuts it."""
        each = -(-num_rows // self.world_size)
        return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))
