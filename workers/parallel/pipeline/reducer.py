"""The sums of a step whose ranks have computed stages: each adds up its micro-batches of its blocks
in the canonical tree, and the ranks with a block meet.

The additions are those of workers/reduction/bitwise.py: the bits do not tell a cut from none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions

from elastic.protocol.pipeline import PipelinePlan
from workers.distributed.process_group import AnyGroup
from workers.parallel.pipeline.block_groups import BlockGroups
from workers.parallel.pipeline.chain import Chain
from workers.parallel.pipeline.links import Links
from workers.parallel.pipeline.neighbours import tag_of_sum
from workers.parallel.pipeline.rows import SharedRows
from workers.reduction.reducers import Reduced
from workers.reduction.tree import FlatLayout, Flats, OwningFold, TreeFold
from workers.reduction.tree_reduction import reduce_tree
from workers.torch_private.autograd import has_hooks_behind
from workers.torch_private.tensors import version_of
from workers.train_state.train_state import TrackedBuffers


@dataclass(slots=True)
class _Segment:
    """What the ranks with some blocks add up."""

    blocks: range
    names: list[str]
    """Of parameters."""
    buffers: list[str]
    members: list[int]
    """Ranks, by pipeline."""
    layout: FlatLayout
    is_everyones: bool
    """All ranks get the sums: every one has all buffers, and scalars."""
    fold: TreeFold | OwningFold | None = None
    """This rank holds it."""
    group: AnyGroup | None = None
    """Of these ranks."""
    lent: dict[str, int] = field(default_factory=dict[str, int])
    """Of parameters whose backward adds to a sum: the sum's version before it."""


class PipelineReducer:
    """See `workers.reduction.reducers.Reducer`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: TrackedBuffers,
        groups: BlockGroups,
        chain: Chain,
        plan: PipelinePlan,
        *,
        ranks: Sequence[int],
        num_microbatches: int,
        links: Links | None = None,
        rows: SharedRows | None = None,
    ) -> None:
        """ranks: by position in the plan. links: None: tags tell messages apart. rows: None:
        parameters are always whole. A collective. Raises PeerLost."""
        group = groups.group
        floating, self._buffers, self._chain = buffers.floating, buffers, chain
        self._parameters, self._buffer_names = dict(parameters), tuple(floating)
        self._group, self._num_microbatches = group, num_microbatches
        self._links = links or Links(group)
        self._plan, self._ranks, self._rows = plan, list(ranks), rows
        like = {n: rows.like(n, p) if rows else p for n, p in parameters.items()}
        self._ids = [p.ids for p in plan.pipelines]
        position = self._ranks.index(group.rank())
        self._held = set(chain.parameters_of(plan.blocks(position)))
        self._segments: list[_Segment] = []
        for blocks in plan.segments():
            names = [n for n in parameters if min(chain.uses[n]) in blocks]
            scalars = [n for n in names if not parameters[n].dim()]
            of_it = [n for n in floating if chain.buffers.get(n, 0) in blocks]
            own = [n for n in names if parameters[n].dim()]
            members = [self._ranks[at] for at in plan.positions_with(blocks.start)]
            for of_kind, buffers_of_kind in ((own, []), (scalars, of_it)):
                if not of_kind and not buffers_of_kind:
                    continue
                layout = FlatLayout(
                    {n: like[n] for n in of_kind},
                    {n: floating[n] for n in buffers_of_kind},
                    len(members),
                )
                is_everyones = of_kind is not own
                segment = _Segment(blocks, of_kind, buffers_of_kind, members, layout, is_everyones)
                if members == [group.rank()] and not is_everyones:
                    segment.fold = OwningFold({n: like[n] for n in of_kind}, num_microbatches)
                elif group.rank() in members:
                    segment.fold = TreeFold(layout, plan.ids(position), num_microbatches)
                    segment.group = groups.of(members)
                self._segments.append(segment)
        self._empty = {
            n: p.new_empty((0, *p.shape[1:]))
            for n, p in parameters.items()
            if p.dim() and n not in self._held
        }
        self.used: set[str] = set()

    def begin(self) -> None:
        if self._rows is not None:
            self._rows.gather()
        for segment in self._segments:
            if segment.fold is not None:
                segment.fold.begin()
        self.used = set()
        self._drop_gradients()

    def before_backward(self, is_last: bool) -> None:
        self._drop_gradients()

    def lend(self, blocks: range) -> None:
        """Before the backward of a stage's next micro-batch, which adds to each gradient at most
        once: let it do so to the sum that the tree has it in first, as long as the gradient is at
        hand. These are the tree's own additions."""
        for segment in self._segments:
            if isinstance(segment.fold, OwningFold) and segment.blocks.start in blocks:
                for name, total in segment.fold.lent.items():
                    parameter = self._parameters[name]
                    if name in self._chain.shared or not _takes(parameter, total):
                        continue
                    parameter.grad, segment.lent[name] = total, version_of(total)

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        self.after_backward_of(range(len(self._plan.costs)), microbatch_id, buffers)

    def after_backward_of(
        self, blocks: range, microbatch_id: int, buffers: Sequence[Tensor]
    ) -> None:
        """As `after_backward`, of one of this rank's stages."""
        values = dict(zip(self._buffer_names, buffers, strict=True))
        for segment in self._segments:
            if segment.fold is not None and segment.blocks.start in blocks:
                gradients = [self._found(n, segment.lent.pop(n, None)) for n in segment.names]
                leaves = [*gradients, *(values[n] for n in segment.buffers)]
                segment.fold.add(microbatch_id, leaves)
        self._drop_gradients()

    def _found(self, name: str, version: int | None) -> Tensor | None:
        """The gradient of a parameter, or the sum that it has been added to, if that had a version
        before."""
        gradient = self._parameters[name].grad
        if gradient is None:
            return None
        if version is not None and version_of(gradient) == version:
            return gradient.add_(0.0)  # it had none; see workers/reduction/tree.py
        self.used.add(name)
        return gradient

    def serve_pass(self) -> None:
        raise AssertionError("every rank of a pipeline has as many passes as the others")

    def finish(self) -> Reduced:
        sums: dict[str, Tensor] = {}
        summed: list[Flats | None] = []
        for segment in self._segments:
            flats, fold = None, segment.fold
            if isinstance(fold, OwningFold):
                sums |= dict(zip(segment.names, fold.release_root(), strict=True))
            elif fold is not None and segment.group is not None:
                flats = reduce_tree(segment.group, fold, self._num_microbatches, self._ids)
            summed.append(flats)
        for segment, flats in zip(self._segments, summed, strict=True):
            if segment.is_everyones:
                flats = self._share(segment, flats)
            if flats is not None:
                names = (*segment.names, *segment.buffers)
                sums |= dict(zip(names, segment.layout.views(flats), strict=True))
        self._share_integers()
        self._share_between_stages(sums)
        gradients = {
            n: self._empty[n] if n in self._empty else self._mine(n, sums[n]).to(p.dtype)
            for n, p in self._parameters.items()
        }
        if self._rows is not None:
            self._rows.release()
        return Reduced(gradients, {name: sums[name] for name in self._buffer_names})

    def _mine(self, name: str, total: Tensor) -> Tensor:
        return total if self._rows is None else self._rows.rows_of(name, total)

    def _share_between_stages(self, sums: dict[str, Tensor]) -> None:
        """Of a parameter that two stages use, each pipeline's first one has added up the gradients:
        the other gets the sum from it."""
        me, sending = self._group.rank(), list[Tensor]()
        for index, name, first, other in self._shared():
            parameter = self._parameters[name]
            if me == first:
                plain = sums[name].to(parameter.dtype).contiguous()
                self._links.post(plain, other, "sum", tag_of_sum(index))
                sending.append(plain)
            elif me == other:
                plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                self._links.receive(plain, first, "sum", tag_of_sum(index)).wait()
                sums[name] = plain
        for work in self._links.posted():
            work.wait()

    def _shared(self) -> Iterator[tuple[int, str, int, int]]:
        """Number and name of a parameter, the rank that has its sum, one of its pipeline's others
        that needs it."""
        shared = [n for n in self._chain.shared if n in self._parameters]
        begin = 0
        for stages in self._plan.pipelines:
            for index, name in enumerate(shared):
                users = sorted({stages.stage_of(block) for block in self._chain.uses[name]})
                first, *others = [self._ranks[begin + stages.place_of(user)] for user in users]
                for other in others if self._parameters[name].dim() else ():
                    if other != first:
                        yield index, name, first, other
            begin += stages.depth

    def _share(self, segment: _Segment, flats: Flats | None) -> Flats:
        """What the first rank with it has, on all ranks. A collective."""
        if len(segment.members) == self._group.size():
            assert flats is not None
            return flats
        mine = flats if flats is not None else segment.layout.empty()
        self._broadcast(mine, segment.members[0])
        return mine

    def _broadcast(self, tensors: Sequence[Tensor], rank: int) -> None:
        options = BroadcastOptions()
        options.rootRank = rank
        for tensor in tensors if self._group.size() > 1 else ():
            self._group.broadcast([tensor], options).wait()

    def _share_integers(self) -> None:
        """Each as the first rank with its block has it. A collective."""
        like, mine = self._buffers.tracked_integers, self._buffers.integers
        values: dict[str, Tensor] = {}
        for blocks in self._plan.segments():
            names = [n for n in like if self._chain.buffers.get(n, 0) in blocks]
            if names:
                held = [mine.get(n, like[n]).contiguous() for n in names]
                flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in held])
                self._broadcast([flat], self._ranks[self._plan.positions_with(blocks.start)[0]])
                parts = flat.split([t.nbytes for t in held])
                for name, tensor, part in zip(names, held, parts, strict=True):
                    values[name] = part.clone().view(tensor.dtype).view(tensor.shape)
        if values:
            self._buffers.replace_integers({name: values[name] for name in like})

    def close(self) -> None:
        self._drop_gradients()
        if self._rows is not None:
            self._rows.release()

    def _drop_gradients(self) -> None:
        for segment in self._segments:
            segment.lent.clear()
        for parameter in self._parameters.values():
            parameter.grad = None


def _takes(parameter: nn.Parameter, total: Tensor) -> bool:
    """A backward adds to this in place what it would be added as, and nobody looks at it."""
    is_seen = has_hooks_behind(parameter)
    return not is_seen and total.dtype == parameter.dtype and total.shape == parameter.shape
