""" "fsdp-grad-op" (ZeRO-2): a step gathers the parameters once and keeps them; gradients add up
whole and go to their owners once, when all passes are done.

A rank's ids are contiguous, as in DDP. Wrapping is fsdp2_private's.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from elastic.protocol.layout import cut
from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.parallel.fsdp2_private.usage import Usage
from workers.parallel.replicated_sums import ReplicatedSums, ScalarGradients
from workers.reduction.reducers import Reduced
from workers.reduction.tree import Block, FlatLayout, TreeFold, blocks_of, fold_blocks
from workers.reduction.tree_reduction import PIECE_ELEMENTS, PIECES_IN_FLIGHT


class FsdpGradOpReducer:
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
        is_bitwise: bool,
    ) -> None:
        self._model, self._group, self._mesh = model, group, mesh
        self._num_microbatches, self._is_bitwise = num_microbatches, is_bitwise
        self._parameters = parameters
        self._buffers = ReplicatedSums(buffers, group, mesh, num_microbatches)
        self._scalars = ScalarGradients(parameters, group, mesh, num_microbatches)
        self._usage = Usage(model, parameters)
        by_id = {id(p.parameter): p for p in model.parameters}
        sharded = {n: p for n, p in parameters.items() if id(p) in by_id}
        self._names = tuple(sharded)
        self._params = [by_id[id(p)] for p in sharded.values()]
        self._layout = FlatLayout(self._pieces(sharded))
        ids = mesh.ids(num_microbatches, group.rank())
        # In fast mode a single leaf holds the sum of all passes.
        self._fold = TreeFold(self._layout, ids if is_bitwise else range(1), num_microbatches)
        for module in model.modules():
            module.set_requires_gradient_sync(False)
            module.set_reshard_after_backward(False)

    def _pieces(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Rank by rank the rows of each parameter that it owns."""
        found: dict[str, Tensor] = {}
        for rank in range(self._mesh.world_size):
            for name, p in parameters.items():
                rows = self._rows_of(p, rank)
                like = torch.empty(1, dtype=p.dtype, device=self._model.device)
                found[f"{name}/{rank}"] = like.expand(len(rows), *p.shape[1:])
        return found

    def _rows_of(self, whole: Tensor, rank: int) -> range:
        return cut(whole.shape[0], self._mesh.num_shards, self._mesh.shard(rank))

    def begin(self) -> None:
        self._model.reset()
        self._buffers.begin()
        self._usage.begin()
        self._scalars.begin()
        self._fold.begin()

    def before_backward(self, is_last: bool) -> None:
        self._usage.watch()

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        self._buffers.add(microbatch_id, buffers)
        self._usage.keep()
        self._scalars.keep(microbatch_id)
        if self._is_bitwise:
            self._add(microbatch_id)

    def serve_pass(self) -> None:
        raise AssertionError("nobody waits for a pass of this strategy")

    @property
    def used(self) -> Set[str]:
        return self._usage.used

    def finish(self) -> Reduced:
        buffers, scalars = self._buffers.finish(), self._scalars.finish()
        if not self._is_bitwise:
            self._add(0)
        self._model.release()
        gradients = dict(scalars)
        for part, flat in zip(self._layout.parts, self._to_owners(), strict=True):
            mine = part.leaves[self._leaves_of(part.leaves, self._group.rank())]
            sizes = [self._layout.shapes[i].numel() for i in mine]
            for leaf, rows in zip(mine, flat.split(sizes), strict=True):
                param = self._params[leaf % len(self._params)]
                value = rows.view(self._layout.shapes[leaf]).to(param.parameter)
                gradients[self._names[leaf % len(self._params)]] = param.sharded(value)
        return Reduced({n: gradients[n] for n in self._parameters if n in gradients}, buffers)

    def close(self) -> None:
        self._usage.close()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _add(self, microbatch_id: int) -> None:
        """Move the whole gradients into the fold, row by row to their owner's stretch."""
        gradients = [p.whole_gradient for p in self._params]
        leaves: list[Tensor | None] = []
        for rank in range(self._mesh.world_size):
            for gradient in gradients:
                if gradient is None:
                    leaves.append(None)
                else:
                    rows = self._rows_of(gradient, rank)
                    leaves.append(gradient[rows.start : rows.stop])
        self._fold.add(microbatch_id, leaves)
        for param in self._params:
            param.drop_whole_gradient()

    def _leaves_of(self, leaves: tuple[int, ...], rank: int) -> slice:
        """Where a part's leaves of one rank stand; they are ordered by rank."""
        count = len(leaves) // self._mesh.world_size
        return slice(rank * count, (rank + 1) * count)

    def _to_owners(self) -> list[Tensor]:
        """Per part: this rank's rows of the sum over all ids, flat."""
        sums, world_size = self._fold.sums(), self._group.size()
        if world_size == 1:
            return self._fold.release_root()
        blocks = [(Block(0, rank),) for rank in range(world_size)]
        if self._is_bitwise:
            all_ids = (self._mesh.ids(self._num_microbatches, r) for r in range(world_size))
            blocks = [blocks_of(ids, self._num_microbatches) for ids in all_ids]
        owned: list[Tensor] = []
        for index, part in enumerate(self._layout.parts):
            shapes = self._layout.shapes
            sizes = [
                sum(shapes[i].numel() for i in part.leaves[self._leaves_of(part.leaves, rank)])
                for rank in range(world_size)
            ]
            partials = [flats[index][: sum(sizes)].split(sizes) for _, flats in sums]
            owned.append(self._exchange(partials, sizes, blocks))
        return owned

    @torch.no_grad()
    def _exchange(
        self,
        partials: Sequence[Sequence[Tensor]],
        sizes: list[int],
        blocks: Sequence[tuple[Block, ...]],
    ) -> Tensor:
        """partials: of each of this rank's blocks, each owner's stretch. A few elements of every
        stretch at a time: what is on its way takes memory beside the partials."""
        own = self._group.rank()
        result = partials[0][own].new_empty(sizes[own])
        limit = PIECE_ELEMENTS.get(result.device.type, 1 << 22)
        step = max(limit // self._group.size(), 1)
        on_their_way: deque[_Piece] = deque()
        for at in range(0, max(sizes), step):
            if len(on_their_way) == PIECES_IN_FLIGHT:
                on_their_way.popleft().fold()
            sent = [[stretch[at : at + step] for stretch in of_block] for of_block in partials]
            place = result[at : at + step]
            on_their_way.append(_Piece(self._group, sent, place, blocks))
        while on_their_way:
            on_their_way.popleft().fold()
        return result


class _Piece:
    """Some of each owner's elements on their way to it, of all blocks."""

    def __init__(
        self,
        group: AnyGroup,
        partials: Sequence[Sequence[Tensor]],
        result: Tensor,
        blocks: Sequence[tuple[Block, ...]],
    ) -> None:
        """result: where the sum of this rank's own goes."""
        self._result, self._blocks = result, blocks
        by_owner = list(zip(*partials, strict=True))
        in_sizes = [sum(piece.numel() for piece in of_owner) for of_owner in by_owner]
        out_sizes = [len(of_rank) * result.numel() for of_rank in blocks]
        self._sent = torch.cat([piece for of_owner in by_owner for piece in of_owner])
        self._received = result.new_empty(sum(out_sizes))
        self._pending = group.all_to_all_flat(self._received, self._sent, out_sizes, in_sizes)

    def fold(self) -> None:
        """Raises PeerLost."""
        self._pending.wait()
        if not self._result.numel():
            return
        received = self._received.split(self._result.numel())
        blocks = (block for of_rank in self._blocks for block in of_rank)
        self._result.copy_(fold_blocks(zip(blocks, received, strict=True)))
