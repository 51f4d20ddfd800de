"""The gradient norm: right, and blind to sharding."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.workers import where
from workers.reduction.norm import (
    clip_coefficient,
    norm_of_rows,
    row_squares,
    squares_by_halves,
    squares_by_norms,
)
from workers.reduction.reducers import Magnitude, Reduced

on_both = pytest.mark.usefixtures("place")


def global_norm(gradients: list[Tensor]) -> float:
    return norm_of_rows(row_squares(gradients))


def _gradients() -> list[torch.Tensor]:
    return [g.to(where.HERE) for g in _on_host()]


def _on_host() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 65), (7,), (), (5, 3, 3, 3), (4, 1), (12, 65), (0, 3), (3, 0), (1, 1001)]
    return [torch.randn(s, generator=generator) * 10.0**i for i, s in enumerate(shapes)]


@on_both
def test_the_norm_is_that_of_all_elements() -> None:
    more = [torch.randn(3, dtype=torch.complex64), torch.ones(3).bfloat16()]
    gradients = [*_gradients(), *(g.to(where.HERE) for g in more)]
    expected = math.sqrt(sum(float(g.abs().double().square().sum()) for g in gradients))
    assert global_norm(gradients) == pytest.approx(expected, rel=1e-13)
    assert global_norm([]) == 0.0


BOTH = pytest.mark.parametrize("squares_of", [squares_by_norms, squares_by_halves])


@BOTH
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_shards", [2, 3, 5, 8])
def test_shards_of_whole_rows_give_the_same_bits(num_shards, num_threads, squares_of) -> None:
    gradients = [*(g for g in _on_host() if g.dim()), torch.randn(2, 70_000)]
    torch.set_num_threads(num_threads)
    try:
        whole = squares_of(gradients)
        pieces: list[list[Tensor]] = [[] for _ in gradients]
        for shard in range(num_shards):
            cut = [
                g[g.shape[0] * shard // num_shards : g.shape[0] * (shard + 1) // num_shards]
                for g in gradients
            ]
            for i, piece in enumerate(squares_of(cut).split([c.shape[0] for c in cut])):
                pieces[i].append(piece)
    finally:
        torch.set_num_threads(1)
    gathered = torch.cat([torch.cat(p) for p in pieces])
    assert gathered.numpy().tobytes() == whole.numpy().tobytes()


@on_both
def test_the_norm_is_that_of_its_rows() -> None:
    gradients = [g for g in _gradients() if g.dim()]
    assert norm_of_rows(row_squares(gradients)) == global_norm(gradients)


@on_both
@pytest.mark.parametrize("num_shards", [1, 3])
def test_rows_are_folded_in_one_order_wherever_they_are(num_shards) -> None:
    on_host = [g for g in _on_host() if g.dim()]
    shards = [[c.to(where.HERE) for c in g.chunk(num_shards)] for g in on_host]
    found = [torch.cat([squares_by_halves([c]).cpu() for c in cut]) for cut in shards]
    assert torch.equal(torch.cat(found), squares_by_halves(on_host))


def by_halves(gradient: Tensor) -> Tensor:
    """The whole gradient at once: columns halved until one is left."""
    squares = gradient.abs().double().square().reshape(gradient.shape[0], -1)
    while squares.shape[1] > 1:
        half = (squares.shape[1] + 1) // 2
        squares[:, : squares.shape[1] - half] += squares[:, half:]
        squares = squares[:, :half]
    return squares.sum(1)


def by_norms(gradient: Tensor) -> Tensor:
    wide = gradient.abs().reshape(gradient.shape[0], -1).double()
    return torch.linalg.vector_norm(wide, dim=1).square() if wide.shape[1] > 1 else wide[:, 0] ** 2


@pytest.mark.parametrize(
    ("squares_of", "defined"), [(squares_by_norms, by_norms), (squares_by_halves, by_halves)]
)
@pytest.mark.parametrize("piece", [1, 7, 130, 1 << 18])
def test_rows_have_the_same_bits_in_pieces_of_any_size(
    piece, squares_of, defined, monkeypatch
) -> None:
    monkeypatch.setattr("workers.reduction.norm.PIECE_ELEMENTS", {"cpu": piece})
    images = torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last)
    more = [images, torch.randn(9, 65).bfloat16(), torch.randn(4, 65).cfloat()]
    gradients = [*(g for g in _on_host() if g.numel() and g.dim()), *more]
    expected = torch.cat([defined(g) for g in gradients])
    assert squares_of(gradients).numpy().tobytes() == expected.numpy().tobytes()


def test_processors_of_several_generations_give_the_same_bits() -> None:
    """Replicas on machines of a mixed fleet clip alike: of all that this machine can be."""
    generations = ("default", "avx2", "avx512")
    newest = torch.backends.cpu.get_cpu_capability().lower()
    assert newest in generations[1:], "there is nothing to compare on this processor"
    text = (
        "import sys, numpy, torch; from workers.reduction.norm import row_squares\n"
        "numbers = numpy.random.default_rng(0).standard_normal((64, 1001), dtype=numpy.float32)\n"
        "sys.stdout.write(row_squares([torch.from_numpy(numbers)]).numpy().tobytes().hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            check=True,
            capture_output=True,
        ).stdout
        for capability in generations[: generations.index(newest) + 1]
    }
    assert len(said) == 1


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


@on_both
def test_strides_and_gradients_stay_what_they_are() -> None:
    plain = torch.randn(6, 10).to(where.HERE)
    double = torch.randn(4, 4).double().to(where.HERE)
    copies = plain.clone(), double.clone()
    assert global_norm([plain.t().contiguous().t()]) == global_norm([plain])
    global_norm([double])
    assert torch.equal(plain, copies[0])
    assert torch.equal(double, copies[1])


@on_both
def test_a_norm_that_is_not_finite_says_so() -> None:
    assert math.isnan(global_norm([torch.tensor([1.0, math.nan], device=where.HERE)]))
    assert global_norm([torch.tensor([1.0, -math.inf], device=where.HERE)]) == math.inf


def test_clipping_scales_down_only() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(0.0, 1.0) == 1.0


@on_both
def test_clipping_tells_what_is_not_finite_without_another_pass() -> None:
    gradients = {"a": torch.full((3, 4), 1e30), "b": torch.ones(5)}
    gradients = {name: g.to(where.HERE) for name, g in gradients.items()}
    squares = {
        "a": row_squares([gradients["a"]]).cpu(),
        "b": row_squares([gradients["b"]]).cpu(),
        "unused": torch.full((2,), math.inf, dtype=torch.float64),  # counts for nothing
    }
    reduced = Reduced(gradients, {}, squares)
    assert reduced.magnitude(torch.Tensor.cpu).is_finite, "float32 numbers have squares in float64"
    assert reduced.magnitude(torch.Tensor.cpu, {"a"}).squares == pytest.approx(12e60 + 5)
    gradients["b"][2] = math.nan
    squares["b"] = row_squares([gradients["b"]]).cpu()
    assert not Reduced(gradients, {}, squares).magnitude(torch.Tensor.cpu).is_finite
    assert not Reduced(gradients, {}).magnitude(torch.Tensor.cpu).is_finite


@on_both
def test_the_pass_that_looks_for_infinities_tells_the_squares_of_what_is_own():
    gradients = {"a": torch.ones(3, 4), "b": torch.full((5,), 2.0)}
    gradients = {name: g.to(where.HERE) for name, g in gradients.items()}
    for own, squares in ((set(), 0.0), ({"b"}, 20.0), ({"a", "b"}, 32.0)):
        found = Reduced(gradients, {}).magnitude(torch.Tensor.cpu, own)
        assert found == Magnitude(is_finite=True, squares=pytest.approx(squares))
    gradients["a"][1, 2] = math.inf
    assert not Reduced(gradients, {}).magnitude(torch.Tensor.cpu, {"b"}).is_finite
    assert Reduced({}, {}).magnitude(torch.Tensor.cpu) == Magnitude(True, 0.0)
