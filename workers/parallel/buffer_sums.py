"""Floating buffers summed over micro-batches where each rank computes any of them.

They are few and replicated, so every rank gathers all and folds them in id order: the canonical
tree, whatever the mesh. Gradients are fsdp.py's and fsdp_grad_op.py's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic.protocol.mesh import Mesh
from workers.groups import AnyGroup
from workers.reduction import Block, fold_blocks


class BufferSums:
    """One generation's; `begin`, `add` for each of this rank's ids, `finish` on all ranks."""

    def __init__(
        self, buffers: Mapping[str, Tensor], group: AnyGroup, mesh: Mesh, num_microbatches: int
    ) -> None:
        self._buffers = tuple(buffers.values())
        self._group = group
        self._ids = [mesh.ids(num_microbatches, rank) for rank in range(mesh.world_size)]
        self._mine: dict[int, Tensor] = {}

    def begin(self) -> None:
        self._mine = {}

    def add(self, microbatch_id: int, leaves: Sequence[Tensor]) -> None:
        """leaves: the buffers in their order, in float64 or complex128."""
        if leaves:
            flat = [_as_real(leaf).reshape(-1) for leaf in leaves]
            self._mine[microbatch_id] = torch.cat(flat)

    def finish(self) -> tuple[Tensor, ...]:
        """The sums. A collective. Raises PeerLost."""
        if not self._mine:
            return ()
        mine = torch.cat([self._mine[i] for i in sorted(self._mine)])
        size = mine.numel() // len(self._mine)
        gathered = [mine.new_empty(len(ids) * size) for ids in self._ids]
        self._group.all_gather(gathered, mine).wait()
        leaf_of = {
            i: leaf
            for ids, flat in zip(self._ids, gathered, strict=True)
            for i, leaf in zip(ids, flat.split(size), strict=True)
        }
        total = fold_blocks((Block(0, i), leaf_of[i]) for i in sorted(leaf_of))
        sizes = [b.numel() * (2 if b.is_complex() else 1) for b in self._buffers]
        parts = zip(self._buffers, total.split(sizes), strict=True)
        return tuple(_like(part, buffer) for buffer, part in parts)


def _as_real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf) if leaf.is_complex() else leaf


def _like(part: Tensor, buffer: Tensor) -> Tensor:
    if buffer.is_complex():
        return torch.view_as_complex(part.view(*buffer.shape, 2))
    return part.view(buffer.shape)
