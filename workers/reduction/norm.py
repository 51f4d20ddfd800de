"""The gradient's global norm, the same bits however many shards its rows are cut into.

The order of additions within a row depends on its width only. In host memory one torch reduction
has that property; on a GPU none has, since they choose by the number of rows, too: there it is
elementwise additions. Clipping is multiplying by `clip_coefficient`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from elastic.protocol.layout import Box, Position, TensorLayout
from elastic.protocol.mesh import Mesh
from workers.distributed.process_group import AnyGroup

PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Of the float64 squares that are at hand at a time, however large the gradients are."""


def row_squares(gradients: Sequence[Tensor]) -> Tensor:
    """float64 sums of squares of the dim-0 rows, concatenated in the order given.

    A shard of whole rows gives exactly its part of this vector.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    matrices = [g if g.dim() else g.reshape(1) for g in gradients]
    if all(m.device.type == "cpu" for m in matrices):
        return squares_by_norms(matrices)
    return squares_by_halves(matrices)


def squares_by_norms(matrices: Sequence[Tensor]) -> Tensor:
    """Of gradients of at least one dimension, in host memory."""
    # Made first: results kept between pieces would have malloc take new memory for each piece.
    total = torch.empty(sum(len(m) for m in matrices), dtype=torch.float64)
    at = 0
    for matrix in matrices:
        width = matrix.shape[1:].numel()
        is_small = matrix.numel() <= PIECE_ELEMENTS["cpu"]
        num_rows = max(PIECE_ELEMENTS["cpu"] // max(width, 1), 1)
        for part in (matrix,) if is_small or width == 1 else matrix.split(num_rows):
            _row_norms(part, width, total[at : at + len(part)])
            at += len(part)
    return total.square_()


def _row_norms(matrix: Tensor, width: int, norms: Tensor) -> None:
    """norms: to be written."""
    if width == 1:
        norms.copy_(_real(matrix).reshape(-1))
        return
    rows = _real(matrix).reshape(len(matrix), width).contiguous()
    if len(rows) == 1:  # several threads would take a part of it each
        rows = rows.expand(2, width)
        norms.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)[:1])
    else:
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64, out=norms)


def squares_by_halves(matrices: Sequence[Tensor]) -> Tensor:
    """Of gradients of at least one dimension, on any device."""
    counts = [m.shape[0] for m in matrices]
    total = matrices[0].new_zeros(sum(counts), dtype=torch.float64)
    sums = total.split(counts)
    by_width: dict[int, list[tuple[int, int]]] = {}
    for i, matrix in enumerate(matrices):
        if width := matrix.shape[1:].numel():
            by_width.setdefault(width, []).append((i, counts[i]))
    limit = PIECE_ELEMENTS.get(total.device.type, 1 << 23)
    most_of = {
        width: min(max(limit // width, 1), sum(count for _, count in members))
        for width, members in by_width.items()
    }
    memory = total.new_empty(max((w * most for w, most in most_of.items()), default=0))
    for width, members in by_width.items():
        squares = memory[: width * most_of[width]].view(-1, width)
        for piece in _pieces(members, most_of[width]):
            at = 0
            for i, rows in piece:
                taken = _real(matrices[i][rows.start : rows.stop])
                squares[at : at + len(rows)].view(taken.shape).copy_(taken)
                at += len(rows)
            folded = _fold(squares[:at].square_()).split([len(rows) for _, rows in piece])
            for (i, rows), part in zip(piece, folded, strict=True):
                sums[i][rows.start : rows.stop] = part
    return total


def squares_of_shards(
    gradients: Sequence[tuple[TensorLayout, Tensor]],
    mesh: Mesh,
    group: AnyGroup,
    read: Callable[[Tensor], Tensor],
    host: torch.device,
) -> tuple[Tensor, ...]:
    """Per gradient the sums of the boxes that are the ranks' own, in the order of one rank. A
    collective.

    gradients: what this rank has of each. read: of the group. host: where they are.
    """
    own = _own_boxes(tuple(layout for layout, _ in gradients), mesh)
    pairs = zip(gradients, own[group.rank()], strict=True)
    mine = read(row_squares([g.to(host) for (_, g), box in pairs if box is not None]))
    sizes = [[_num_rows(box) for box in of_rank] for of_rank in own]
    gathered = [mine.new_empty(sum(of_rank)) for of_rank in sizes]
    group.control.all_gather(gathered, mine).wait()
    parts = [flat.split(of_rank) for flat, of_rank in zip(gathered, sizes, strict=True)]
    ordered: list[Tensor] = []
    for i in range(len(gradients)):
        found = [(box.start, r) for r, of_rank in enumerate(own) if (box := of_rank[i]) is not None]
        # Column by column: where only rows are cut differently, the order is the same.
        found.sort(key=lambda one: (one[0][1:], one[0]))
        ordered.append(torch.cat([parts[r][i] for _, r in found]))
    return tuple(ordered)


@lru_cache(maxsize=4)
def _own_boxes(layouts: tuple[TensorLayout, ...], mesh: Mesh) -> list[list[Box | None]]:
    """By rank and gradient; the same in every step of a generation."""
    ranks = range(mesh.world_size)
    return [[layout.own(Position(mesh, rank)) for layout in layouts] for rank in ranks]


def _num_rows(box: Box | None) -> int:
    return 0 if box is None else next(iter(box.shape), 1)


def norm_of_rows(squares: Tensor) -> float:
    """The 2-norm from the whole vector of row sums, which every rank must hold in full, on the
    host: they are added up in one order, wherever they come from."""
    return math.sqrt(total) if (total := float(squares.cpu().sum())) >= 0 else math.nan


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply gradients by, as `torch.nn.utils.clip_grad_norm_` does."""
    assert math.isfinite(norm), f"the norm of finite gradients is {norm}"
    return min(1.0, max_norm / (norm + 1e-6))


def _real(gradient: Tensor) -> Tensor:
    return gradient.abs() if gradient.is_complex() else gradient


def _pieces(counts: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, range]]]:
    """Rows of matrices (index, number of rows), one after the other, at most so many at a time."""
    piece: list[tuple[int, range]] = []
    room = most
    for i, count in counts:
        first = 0
        while first < count:
            rows = range(first, min(first + room, count))
            piece.append((i, rows))
            first, room = rows.stop, room - len(rows)
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _fold(matrix: Tensor) -> Tensor:
    """Row sums by halving the columns; overwrites them."""
    width = matrix.shape[1]
    while width > 1:
        half = (width + 1) // 2
        matrix[:, : width - half] += matrix[:, half:width]
        width = half
    return matrix[:, 0]
