"""Parameters whose rows are shared by those who compute the same blocks ("pp:S,fsdp-grad-op"):
whole in a step or an evaluation, this rank's rows in between.

What a rank holds between steps is parts.py's, whose gradients go where reducer.py's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch import Tensor, nn

from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import Position
from elastic.protocol.mesh import Mesh
from workers.parallel.pipeline.block_groups import BlockGroups
from workers.parallel.pipeline.parts import StageParts


class SharedRows:
    """Of one rank, for a generation. Without parameters that are shared so, nothing happens."""

    def __init__(
        self,
        parts: StageParts,
        mesh: Mesh,
        groups: BlockGroups,
        on_lost: Callable[[PeerLost], NoReturn],
        gathering: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """gathering: entered while this rank waits."""
        self._groups, self._rank = groups, groups.group.rank()
        self._on_lost, self._gathering = on_lost, gathering
        self._parameters = {n: p for n, p in parts.parameters.items() if parts.has_rows(n)}
        self._shapes = {n: parts.whole[n].shape for n in self._parameters}
        self._rows: dict[str, Tensor] = {}
        """This rank's, while the parameters are whole."""
        self._together: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        """By who holds them."""
        self._counts: dict[str, list[int]] = {}
        """By parameter how many rows each rank has."""
        self._mine: dict[str, slice] = {}
        for name, parameter in self._parameters.items():
            layout = parts.layout_of(name)
            ranks = tuple(mesh.ranks_with_blocks(layout.blocks))
            boxes = [layout.box(Position(mesh, rank)) for rank in ranks]
            self._counts[name] = [box.shape[0] for box in boxes]
            self._together.setdefault((ranks, parameter.dtype), []).append(name)
            if self._rank in ranks:
                box = boxes[ranks.index(self._rank)]
                self._mine[name] = slice(box.start[0], box.stop[0])

    def gather(self) -> None:
        """From now on the parameters of this rank's blocks are whole. A collective."""
        with self._gathering():
            try:
                for (ranks, _), names in self._together.items():
                    if self._rank in ranks:
                        self._gather(ranks, names)
            except PeerLost as error:
                self.release()
                self._on_lost(error)

    @torch.no_grad()
    def _gather(self, ranks: tuple[int, ...], names: list[str]) -> None:
        mine = [self._parameters[n].detach() for n in names]
        sizes = [[rows * self._width(n) for rows in self._counts[n]] for n in names]
        of_rank = [sum(of_names) for of_names in zip(*sizes, strict=True)]
        pieces = [t.reshape(-1) for t in mine]
        flat = pieces[0].new_empty(max(of_rank))  # of one size on all ranks: nothing is repacked
        torch.cat(pieces, out=flat[: sum(t.numel() for t in pieces)])
        gathered = [flat]
        if len(ranks) > 1:
            received = flat.new_empty(len(ranks) * flat.numel())
            self._groups.of(ranks).all_gather_flat(received, flat).wait()
            rows = received.view(len(ranks), flat.numel())
            gathered = [row[:size] for row, size in zip(rows, of_rank, strict=True)]
        by_rank = zip(gathered, zip(*sizes, strict=True), strict=True)
        of_ranks = [all_of_it.split(list(of_names)) for all_of_it, of_names in by_rank]
        for name, own, parts in zip(names, mine, zip(*of_ranks, strict=True), strict=True):
            parameter = self._parameters[name]
            self._rows[name], parameter.grad = own, None
            parameter.data = torch.cat(parts).view(self._shapes[name])

    def _width(self, name: str) -> int:
        return self._shapes[name][1:].numel()

    def rows_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's, in memory of their own."""
        return whole[self._mine[name]].clone() if name in self._mine else whole

    def like(self, name: str, parameter: nn.Parameter) -> Tensor:
        """What has a parameter's shape, dtype and device when it is whole."""
        if name not in self._parameters:
            return parameter
        one = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        return one.expand(self._shapes[name])

    @torch.no_grad()
    def release(self) -> None:
        """They are rows again; nothing happens if they are already."""
        for name, rows in self._rows.items():
            parameter = self._parameters[name]
            parameter.grad, parameter.data = None, rows
        self._rows = {}
