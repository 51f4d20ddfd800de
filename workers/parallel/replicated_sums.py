"""What stays replicated although parameters are sharded, summed over micro-batches: floating
buffers, and the gradients of scalar parameters.

They are few, so every rank gathers all and folds them in id order: the canonical tree, whatever
the mesh. Other gradients are fsdp.py's and fsdp_grad_op.py's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.reduction.tree import Block, fold_blocks
from workers.tensors.local import is_shard


class ReplicatedSums:
    """One generation's; `begin`, `add` for each of this rank's ids, `finish` on all ranks."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        group: AnyGroup,
        mesh: Mesh,
        num_microbatches: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """like: tensors of the leaves' shapes. dtype: of the leaves."""
        self._like, self._dtype = like, dtype
        self._group = group
        self._ids = [mesh.ids(num_microbatches, rank) for rank in range(mesh.world_size)]
        self._mine: dict[int, Tensor] = {}

    def begin(self) -> None:
        self._mine = {}

    def add(self, microbatch_id: int, leaves: Sequence[Tensor]) -> None:
        """leaves: of one dtype, or real and complex ones of one precision."""
        if leaves:
            flat = [_as_real(leaf).reshape(-1) for leaf in leaves]
            self._mine[microbatch_id] = torch.cat(flat)

    def finish(self) -> dict[str, Tensor]:
        """The sums, by the names of `like`. A collective. Raises PeerLost."""
        if not self._like:
            return {}
        sizes = [b.numel() * (2 if b.is_complex() else 1) for b in self._like.values()]
        size, mine = sum(sizes), self._own()
        gathered = [mine.new_empty(len(ids) * size) for ids in self._ids]
        self._group.all_gather(gathered, mine).wait()
        leaf_of = {
            i: leaf
            for ids, flat in zip(self._ids, gathered, strict=True)
            for i, leaf in zip(ids, flat.view(len(ids), size), strict=True)
        }
        total = fold_blocks((Block(0, i), leaf_of[i]) for i in sorted(leaf_of))
        parts = zip(self._like.items(), total.split(sizes), strict=True)
        return {name: _shaped(part, like) for (name, like), part in parts}

    def _own(self) -> Tensor:
        if self._mine:
            return torch.cat([self._mine[i] for i in sorted(self._mine)])
        some = next(iter(self._like.values()))
        return some.new_empty(0, dtype=self._dtype)  # this rank is inactive


def _as_real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(part.view(*like.shape, 2))
    return part.view(like.shape)


class ScalarGradients:
    """The gradients of the parameters that are not sharded, by name."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: AnyGroup,
        mesh: Mesh,
        num_microbatches: int,
    ) -> None:
        self._scalars = {name: p for name, p in parameters.items() if not is_shard(p)}
        like = {name: p.detach() for name, p in self._scalars.items()}
        dtype = next((p.dtype for p in like.values()), torch.float64)
        self._sums = ReplicatedSums(like, group, mesh, num_microbatches, dtype)

    def begin(self) -> None:
        self._sums.begin()
        self._clear()

    def keep(self, microbatch_id: int) -> None:
        """After a backward."""
        self._sums.add(
            microbatch_id,
            [torch.zeros_like(p) if p.grad is None else p.grad for p in self._scalars.values()],
        )
        self._clear()

    def _clear(self) -> None:
        for p in self._scalars.values():
            p.grad = None

    def finish(self) -> dict[str, Tensor]:
        """A collective. Raises PeerLost."""
        return self._sums.finish()
