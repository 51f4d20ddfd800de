""" "hsdp:S": what its replicas add to "fsdp" inside each of them: sums across the replicas, and the
ranks that are inactive.

A replica's rounds are fsdp.py's; who is where in the mesh is elastic/protocol/mesh.py's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.parallel.replicated_sums import ReplicatedSums, ScalarGradients
from workers.reduction.reducers import Reduced
from workers.reduction.tree import FlatLayout, TreeFold
from workers.reduction.tree_reduction import reduce_tree
from workers.tensors.local import is_shard, like, local


class ReplicaStack:
    """The canonical tree over flat slices of one parameter group: this replica's ids on this rank,
    the rest by those who hold the same rows. Stands where a CarryStack does."""

    def __init__(
        self,
        like: Tensor,
        size: int,
        replicas: AnyGroup,
        ids: range,
        num_microbatches: int,
    ) -> None:
        """like: of the slice's dtype and device. size: its elements. ids: this replica's."""
        self._size, self._replicas, self._ids = size, replicas, ids
        self._num_microbatches, self._device = num_microbatches, like.device
        slice_ = {"slice": like.new_empty(1).expand(size)}
        layout = FlatLayout(slice_, world_size=replicas.size())
        self._fold = TreeFold(layout, ids, num_microbatches)

    def begin(self) -> None:
        self._fold.begin()

    def push(self, microbatch_id: int, leaf: Sequence[Tensor]) -> None:
        """leaf: the slice, whole or in parts; of offloaded state it may be on the host. It is not
        kept; a missing id counts as zeros."""
        parts = [part.reshape(-1).to(self._device) for part in leaf]
        self._skip_to(microbatch_id)
        self._fold.add(microbatch_id, [parts[0] if len(parts) == 1 else torch.cat(parts)])

    def root(self) -> list[Tensor]:
        """The sum over all ids, flat. A collective of those who hold the same rows. Raises
        PeerLost. The result is valid until the next `begin`."""
        self._skip_to(self._ids.stop)
        (flat,) = reduce_tree(self._replicas, self._fold, self._num_microbatches)
        return [flat[: self._size]]

    def _skip_to(self, microbatch_id: int) -> None:
        for absent in range(self._fold.next_id, microbatch_id):
            self._fold.add(absent, [None])


class InactiveReducer:
    """See `workers.reduction.reducers.Reducer`. Its rank computes nothing, but agrees to every
    step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        group: AnyGroup,
        mesh: Mesh,
        num_microbatches: int,
    ) -> None:
        self._parameters = parameters
        self._buffers = ReplicatedSums(buffers, group, mesh, num_microbatches)
        self._scalars = ScalarGradients(parameters, group, mesh, num_microbatches)
        self.used: set[str] = set()

    def begin(self) -> None:
        self._buffers.begin()
        self._scalars.begin()

    def before_backward(self, is_last: bool) -> None:
        raise AssertionError("a rank that is inactive has no passes")

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        raise AssertionError("a rank that is inactive has no passes")

    def serve_pass(self) -> None:
        raise AssertionError("a rank that is inactive has no passes")

    def finish(self) -> Reduced:
        buffers, scalars = self._buffers.finish(), self._scalars.finish()
        gradients = {
            n: like(torch.empty_like(local(p.detach())), p) if is_shard(p) else scalars[n]
            for n, p in self._parameters.items()
        }
        return Reduced(gradients, buffers)

    def close(self) -> None:
        pass
