"""In which order the elements of a tensor lie in memory: by rows, channels_last, transposed.

Kernels that walk through memory, as those of a fused optimizer do, take it for granted that a
parameter, its gradient and its state lie alike; nobody checks. What is sharded lies by rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row by row."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(tensor: Tensor) -> bool:
    """Its elements fill its memory, in whatever order: no gap, and no two at one place."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of `tensor` if it is dense, else row by row: what autograd gives its gradient."""
    return tensor.stride() if is_dense(tensor) else plain_strides(tensor.shape)


def is_channels_last(tensor: Tensor) -> bool:
    """Convolutions choose that format for it. For one of 1 x 1 its strides alone say so."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_plain = tensor.stride() == plain_strides(tensor.shape)
    if is_plain or tensor.dim() not in formats:
        return False
    return tensor.is_contiguous(memory_format=formats[tensor.dim()])


def laid_out(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """`tensor` with these dense strides: itself, or a copy where its elements lie otherwise."""
    strides = tuple(strides)
    if tensor.stride() == strides:
        return tensor
    if all(
        size == 1 or old == new
        for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True)
    ):
        return tensor.as_strided(tensor.shape, strides)
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
