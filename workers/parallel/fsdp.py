""" "fsdp" (ZeRO-3): parameters, gradients and optimizer state are sharded; every pass gathers the
parameters twice and sends the gradient's slices to their owners.

In round r the ranks compute ids r * W, r * W + 1, ..., which are neighbours in the canonical tree,
so an owner folds each round's slices as they come. The ranks of an HSDP replica do the same with
the replica's ids (hsdp.py). Wrapping is fsdp2_private's.
"""

from collections.abc import Mapping, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.parallel.collectives import Collectives
from workers.parallel.fsdp2_private.hooks import GradientSlices, ParameterGather
from workers.parallel.fsdp2_private.parameters import ParameterGroup
from workers.parallel.fsdp2_private.served_pass import ServedPass
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.fsdp2_private.usage import Usage
from workers.parallel.hsdp import ReplicaStack
from workers.parallel.replicated_sums import ReplicatedSums, ScalarGradients
from workers.reduction.reducers import Reduced
from workers.reduction.tree import CarryStack
from workers.tensors.local import local


class FsdpReducer:
    """See `workers.reduction.reducers.Reducer`."""

    def __init__(
        self,
        model: ShardedModel,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        group: AnyGroup,
        mesh: Mesh,
        num_microbatches: int,
        *,
        collectives: Collectives,
        replicas: AnyGroup,
        is_bitwise: bool,
    ) -> None:
        """collectives: over the shard axis. replicas: who holds the same rows. group: all."""
        self._model, self._parameters = model, parameters
        self._is_bitwise = is_bitwise
        self._buffers = ReplicatedSums(buffers, group, mesh, num_microbatches)
        self._scalars = ScalarGradients(parameters, group, mesh, num_microbatches)
        self._usage = Usage(model, parameters)
        self._replicas, self._num_shards = replicas, mesh.num_shards
        self._all_ids = mesh.ids_of_replica(num_microbatches, mesh.replica(group.rank()))
        self._round = 0
        self._folds = [
            _GroupFold(fsdp_group, replicas, self._all_ids, num_microbatches)
            for fsdp_group in model.groups
        ]
        self._collectives = collectives
        self._served = ServedPass(model)
        for i, fold in enumerate(self._folds):
            take, noted = partial(self._take, fold), partial(self._served.note_gather, fold.group)
            gather = ParameterGather(collectives, noted)
            fold.group.communicate(gather, GradientSlices(collectives, f"slices {i}", take))

    def begin(self) -> None:
        self._model.reset()
        self._buffers.begin()
        self._usage.begin()
        self._scalars.begin()
        self._served.begin()
        self._round = 0
        for fold in self._folds:
            fold.begin()

    def before_backward(self, is_last: bool) -> None:
        self._usage.watch()
        for fold in self._folds:
            fold.before_backward()

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        self._buffers.add(microbatch_id, buffers)
        self._usage.keep()
        self._scalars.keep(microbatch_id)
        self._end_pass()

    def serve_pass(self) -> None:
        self._served.make()
        self._end_pass()

    @property
    def used(self) -> Set[str]:
        return self._usage.used

    def finish(self) -> Reduced:
        if self._num_shards > 1:
            self._collectives.check_order()
        buffers, scalars = self._buffers.finish(), self._scalars.finish()
        for fold in self._folds:
            fold.finish(is_bitwise=self._is_bitwise)
        self._model.release()
        given = {n: scalars.get(n, p.grad) for n, p in self._parameters.items()}
        return Reduced({n: g for n, g in given.items() if g is not None}, buffers)

    def close(self) -> None:
        self._usage.close()
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def _ids(self) -> range:
        """What the ranks compute in this round; ranks behind its end serve the others."""
        first = self._round * self._num_shards
        return self._all_ids[first : first + self._num_shards]

    def _take(self, fold: "_GroupFold", slices: Tensor, output: Tensor) -> None:
        self._served.note_slices(fold.group)
        if self._is_bitwise:
            fold.take(self._ids, slices)
        else:
            counted = slices.view(self._num_shards, -1)[: len(self._ids)]
            torch.sum(counted, dim=0, out=output)

    def _end_pass(self) -> None:
        if self._is_bitwise:
            for fold in self._folds:
                fold.end_pass(self._ids, is_alone=self._num_shards == 1)
            for parameter in self._parameters.values():
                parameter.grad = None
        self._served.end_pass()
        self._round += 1


class _GroupFold:
    """The canonical tree over one parameter group's gradient slices."""

    def __init__(
        self, group: ParameterGroup, replicas: AnyGroup, ids: range, num_microbatches: int
    ) -> None:
        self.group, self._replicas = group, replicas
        self._params = group.trained
        self._stack: CarryStack | ReplicaStack = CarryStack(num_microbatches)
        if replicas.size() > 1 and self._params:
            like, size = group.like().new_empty(0, device=group.device), sum(self._sizes())
            self._stack = ReplicaStack(like, size, replicas, ids, num_microbatches)
        self._has_many_uses = False
        self._pending: Tensor | None = None

    def begin(self) -> None:
        self._stack.begin()
        self._pending = None

    def before_backward(self) -> None:
        self._has_many_uses = self.group.has_many_uses

    def take(self, ids: range, slices: Tensor) -> None:
        """This rank's slice of the gradient of each of `ids`, and nothing of use behind them."""
        if not self._has_many_uses:
            self._push(ids, slices)
        elif self._pending is None:
            self._pending = slices
        else:
            self._pending.add_(slices)

    def end_pass(self, ids: range, *, is_alone: bool) -> None:
        if is_alone:  # nothing was sent: FSDP2 has put the gradient where it belongs
            found = [g for p in self._params if (g := p.parameter.grad) is not None]
            if found and len(found) == len(self._params):
                self._stack.push(ids[0], [local(g) for g in found])
        elif self._pending is not None:
            self._push(ids, self._pending)
            self._pending = None

    def finish(self, *, is_bitwise: bool) -> None:
        """The sum over all ids becomes the parameters' gradient. A collective of the replicas."""
        if not self._params:
            return
        if is_bitwise:
            root = self._stack.root()
        elif self._replicas.size() > 1:
            root = [self._summed()]
        else:
            return  # FSDP2 has put it there
        if root is None:
            return
        parts = root[0].reshape(-1).split(self._sizes()) if len(root) == 1 else root
        for param, part in zip(self._params, parts, strict=True):
            rows = part.reshape(-1)[: param.rows_shape.numel()].view(param.rows_shape)
            param.parameter.grad = param.sharded(rows.to(param.parameter.device))

    def _sizes(self) -> list[int]:
        return [p.padded_numel for p in self._params]

    def _summed(self) -> Tensor:
        """The stock way: what this replica added up, over all replicas."""
        flat = self.group.like().new_zeros(sum(self._sizes()), device=self.group.device)
        for param, part in zip(self._params, flat.split(self._sizes()), strict=True):
            gradient = param.parameter.grad
            if gradient is not None:
                mine = local(gradient).reshape(-1)
                part[: mine.numel()].copy_(mine)
        self._replicas.all_reduce(flat).wait()
        return flat

    def _push(self, ids: range, slices: Tensor) -> None:
        size = slices.numel() // self.group.num_shards
        for microbatch_id, piece in zip(ids, slices.split(size), strict=False):
            self._stack.push(microbatch_id, [piece])
