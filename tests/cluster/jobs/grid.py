"""A strategy that exists for tests only: ranks form a grid, and gradients cross its two axes.

Nothing of the project knows it: `parallel="grid:build_grid"` names its function.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup
from workers.distributed.process_group import AnyGroup
from workers.parallel.ddp import Replicated, build_replica
from workers.reduction.reducers import Reduced, Reducer
from workers.reduction.tree import Block, fold_blocks

GRID = f"{__name__}:build_grid"
NUM_COLUMNS = 2


def build_grid(
    workload: Any, spec: WorkerSpec, device: torch.device, open_backup: Callable[[], Backup]
) -> "Grid":
    build = lambda: build_replica(workload, spec, device)  # noqa: E731
    return Grid(spec, build(), build)


class Grid(Replicated):
    """Every rank holds the whole state, as its layout says; rows and columns of ranks have a group
    each."""

    def reducer(
        self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, group: AnyGroup
    ) -> Reducer:
        width = NUM_COLUMNS if group.size() % NUM_COLUMNS == 0 else 1
        grid, rank = Mesh(Parallel("fsdp", tp=width), group.size()), group.rank()
        in_row, in_column = grid.along("tp", rank), grid.along("dp_shard", rank)
        timeout_s = self._spec.timeouts.join_s
        rows = group.part(f"row{in_row[0]}", in_row, timeout_s)
        columns = group.part(f"column{in_column[0]}", in_column, timeout_s)
        ids = [mesh.ids(self._spec.num_microbatches, r) for r in range(group.size())]
        by_row = [[i for r in grid.along("tp", first) for i in ids[r]] for first in in_column]
        axes = ((rows, [ids[r] for r in in_row]), (columns, by_row))
        return GridReducer(parameters, tuple(self.train_state.buffers.floating), axes)


class GridReducer:
    """See `workers.reduction.reducers.Reducer`: all ranks have all leaves, and fold them alike."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Sequence[str],
        axes: Sequence[tuple[AnyGroup, Sequence[Sequence[int]]]],
    ) -> None:
        """axes: the group, and the ids that each of its ranks has once the axes before are done."""
        self._parameters, self._names = tuple(parameters.values()), tuple(parameters)
        self._buffer_names, self._axes = buffers, axes
        self.used: set[str] = set()

    def begin(self) -> None:
        self._leaves: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self.used = set()
        self._drop()

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, is_last: bool) -> None:
        pass

    def after_backward(self, microbatch_id: int, buffers: Sequence[Tensor]) -> None:
        gradients = [p.grad for p in self._parameters]
        self.used |= {n for n, g in zip(self._names, gradients, strict=True) if g is not None}
        whole = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(self._parameters, gradients, strict=True)
        ]
        self._leaves.append(torch.cat([g.reshape(-1) for g in whole]))
        self._shapes = [b.shape for b in buffers]
        self._buffers.append(torch.cat([b.reshape(-1) for b in buffers]))
        self._drop()

    def serve_pass(self) -> None:
        raise AssertionError("replicas need nothing of each other's passes")

    def finish(self) -> Reduced:
        gradients, buffers = self._sum(self._leaves), self._sum(self._buffers)
        parts = gradients.split([p.numel() for p in self._parameters])
        sums = buffers.split([shape.numel() for shape in self._shapes])
        views = [g.view(p.shape) for g, p in zip(parts, self._parameters, strict=True)]
        means = [b.view(shape) for b, shape in zip(sums, self._shapes, strict=True)]
        return Reduced(
            dict(zip(self._names, views, strict=True)),
            dict(zip(self._buffer_names, means, strict=True)),
        )

    def close(self) -> None:
        self._drop()

    def _sum(self, mine: list[Tensor]) -> Tensor:
        size, flat, ids = mine[0].numel(), torch.cat(mine), []
        for group, by_rank in self._axes:
            gathered = [flat.new_empty(len(ids) * size) for ids in by_rank]
            group.all_gather(gathered, flat).wait()
            flat, ids = torch.cat(gathered), [i for of_rank in by_rank for i in of_rank]
        leaves = dict(zip(ids, flat.view(len(ids), size), strict=True))
        return fold_blocks((Block(0, i), leaves[i]) for i in sorted(leaves))
