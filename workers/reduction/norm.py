"""The gradient's global norm, the same bits however the rows of the gradient are sharded.

Only elementwise additions are used within a row: a library's sum may choose another order when
a shard has another number of rows. Clipping is multiplying by `clip_coefficient`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def row_squares(gradients: Sequence[Tensor]) -> Tensor:
    """float64 sums of squares of the dim-0 rows, concatenated in the order given.

    A shard of whole rows gives exactly its part of this vector.
    """
    sums: list[Tensor] = [torch.empty(0)] * len(gradients)
    by_width: dict[int, list[int]] = {}
    for i, gradient in enumerate(gradients):
        rows = gradient.shape[0] if gradient.dim() else 1
        width = gradient.numel() // rows if rows else 0
        by_width.setdefault(width, []).append(i)
    for width, members in by_width.items():
        matrices = [_real(gradients[i]).reshape(-1, width) if width else None for i in members]
        for i, matrix in zip(members, matrices, strict=True):
            if matrix is None:
                sums[i] = gradients[i].new_zeros(
                    gradients[i].shape[0] if gradients[i].dim() else 1, dtype=torch.float64
                )
        present = [m for m in matrices if m is not None]
        if present:
            stacked = present[0] if len(present) == 1 else torch.cat(present)
            folded = _folded_squares(stacked).split([m.shape[0] for m in present])
            for i, part in zip(members, folded, strict=True):
                sums[i] = part
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.float64)


def global_norm(gradients: Sequence[Tensor]) -> float:
    """The 2-norm over all gradients; not finite if any gradient is not."""
    return norm_of_rows(row_squares(gradients))


def norm_of_rows(squares: Tensor) -> float:
    """The 2-norm from the whole vector of row sums, which every rank must hold in full."""
    return math.sqrt(total) if (total := float(squares.sum())) >= 0 else math.nan


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply gradients by, as `torch.nn.utils.clip_grad_norm_` does."""
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else norm


def _real(gradient: Tensor) -> Tensor:
    return gradient.abs() if gradient.is_complex() else gradient


def _folded_squares(matrix: Tensor) -> Tensor:
    """Row sums of squares by halving the columns."""
    squares = matrix.double()
    squares = squares.square_() if squares is not matrix else squares.square()
    width = squares.shape[1]
    while width > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:width]
        width = half
    return squares[:, 0].clone()
