"""The gradient norm: right, and blind to sharding."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.reduction.norm import clip_coefficient, global_norm, norm_of_rows, row_squares


def _gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 65), (7,), (), (5, 3, 3, 3), (4, 1), (12, 65), (0, 3), (3, 0), (1, 1001)]
    return [torch.randn(s, generator=generator) * 10.0**i for i, s in enumerate(shapes)]


def test_the_norm_is_that_of_all_elements() -> None:
    gradients = [*_gradients(), torch.randn(3, dtype=torch.complex64), torch.ones(3).bfloat16()]
    expected = math.sqrt(sum(float(g.abs().double().square().sum()) for g in gradients))
    assert global_norm(gradients) == pytest.approx(expected, rel=1e-13)
    assert global_norm([]) == 0.0


@pytest.mark.parametrize("num_shards", [2, 3, 5, 8])
def test_shards_of_whole_rows_give_the_same_bits(num_shards: int) -> None:
    gradients = [g for g in _gradients() if g.dim()]
    whole = row_squares(gradients)
    pieces: list[list[torch.Tensor]] = [[] for _ in gradients]
    for shard in range(num_shards):
        cut = [
            g[g.shape[0] * shard // num_shards : g.shape[0] * (shard + 1) // num_shards]
            for g in gradients
        ]
        for i, piece in enumerate(row_squares(cut).split([c.shape[0] for c in cut])):
            pieces[i].append(piece)
    gathered = torch.cat([torch.cat(p) for p in pieces])
    assert gathered.numpy().tobytes() == whole.numpy().tobytes()
    assert norm_of_rows(gathered) == global_norm(gradients)


def by_definition(gradient: Tensor) -> Tensor:
    """The whole gradient at once: columns halved until one is left."""
    rows = gradient.shape[0] if gradient.dim() else 1
    squares = gradient.abs().double().square().reshape(rows, -1 if gradient.numel() else 0)
    while squares.shape[1] > 1:
        half = (squares.shape[1] + 1) // 2
        squares[:, : squares.shape[1] - half] += squares[:, half:]
        squares = squares[:, :half]
    return squares.sum(1)


@pytest.mark.parametrize("piece", [1, 7, 130, 1 << 18])
def test_rows_have_the_same_bits_in_pieces_of_any_size(piece, monkeypatch) -> None:
    monkeypatch.setattr("workers.reduction.norm.PIECE_ELEMENTS", {"cpu": piece})
    images = torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last)
    gradients = [*_gradients(), images, torch.randn(9, 65).bfloat16(), torch.randn(4, 65).cfloat()]
    expected = torch.cat([by_definition(g) for g in gradients])
    assert row_squares(gradients).numpy().tobytes() == expected.numpy().tobytes()


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that are made inside."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        had = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in had:
                self.size_bytes += tensor.untyped_storage().nbytes()
        return result


def test_the_norm_takes_memory_for_a_few_rows_however_large_the_gradients_are() -> None:
    gradients = [torch.ones(3000, 512), torch.ones(1000, 512), torch.ones(1000, 64, 3, 3)]
    num_bytes = sum(g.nbytes for g in gradients)
    with Allocated() as allocated:
        row_squares(gradients)
    assert allocated.size_bytes < num_bytes / 4, "a quarter of what the gradients take"


def test_strides_and_gradients_stay_what_they_are() -> None:
    plain = torch.randn(6, 10)
    double = torch.randn(4, 4).double()
    copies = plain.clone(), double.clone()
    assert global_norm([plain.t().contiguous().t()]) == global_norm([plain])
    global_norm([double])
    assert torch.equal(plain, copies[0])
    assert torch.equal(double, copies[1])


def test_a_norm_that_is_not_finite_says_so() -> None:
    assert math.isnan(global_norm([torch.tensor([1.0, math.nan])]))
    assert global_norm([torch.tensor([1.0, -math.inf])]) == math.inf


def test_clipping_scales_down_only() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(0.0, 1.0) == 1.0
