"""A backward in two halves: what the stage before waits for comes first, the parameters' gradients
later, and both have the bits of a whole backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.workers import where
from tests.workers.pipeline_models import WIDTH, Attention, Gate, InPlace, weight_normed
from workers.parallel.pipeline.backward import StageBackward
from workers.workloads.charlm import Block


class Twice(nn.Module):
    """Its gradient is a sum: in which order, a whole backward says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(self.linear(torch.tanh(self.linear(torch.tanh(self.linear(x))))))


class Beside(nn.Module):
    """A result of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, x):
        return self.linear(x), self.table.weight.cumsum(0)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def gradients(
    module: nn.Module, x: Tensor, backward: Callable[[StageBackward], object]
) -> list[Tensor | None]:
    """Of the input and the parameters."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.grad = None
    x = x.clone().requires_grad_()
    found = module(x.clone())
    results = list(found) if isinstance(found, tuple) else [found]
    given = [torch.randn_like(t) for t in results]
    backward(StageBackward(results, given, [x], list(module.parameters())))
    return [x.grad, *(p.grad for p in module.parameters())]


def in_halves(module: nn.Module) -> Callable[[StageBackward], object]:
    def backward(stage: StageBackward) -> None:
        stage.inputs()
        assert all(p.grad is None for p in module.parameters())
        stage.weights()

    return backward


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(Block(WIDTH, 2, 0.1), Block(WIDTH, 2, 0.1)), (2, 5, WIDTH)),
        (lambda: nn.Sequential(Gate(), InPlace(), weight_normed()), (4, WIDTH)),
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU()), (2, 3, WIDTH)),
        (lambda: Attention(), (2, 5, WIDTH)),
        (Twice, (4, WIDTH)),
        (Beside, (4, WIDTH)),
        (Reentrant, (4, WIDTH)),
    ],
)
def test_both_halves_have_the_bits_of_a_whole_backward(build, shape):
    compare_with_whole(build, shape)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_both_halves_of_a_recurrent_layer_have_the_bits_of_a_whole_backward(kind):
    with where.on_cpu():  # the simulated device has no such kernels
        compare_with_whole(lambda: Recurrent(kind), (2, 5, WIDTH))


def compare_with_whole(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = build().to(where.HERE), torch.randn(shape).to(where.HERE)
    wanted = gradients(module, x, StageBackward.whole)
    found = gradients(module, x, in_halves(module))
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


class Counted(torch.autograd.Function):
    """Which gradients are computed when."""

    @staticmethod
    def forward(ctx, tensor: Tensor, kind: str, seen: list[str]) -> Tensor:
        ctx.kind, ctx.seen = kind, seen
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append(ctx.kind)
        return gradient, None, None


def test_nothing_is_computed_in_both_halves():
    seen: list[str] = []
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)]
    x = torch.randn(4, WIDTH).requires_grad_()
    result: Tensor = x
    for weight in weights:
        result = Counted.apply(result, "input", seen) @ Counted.apply(weight, "weight", seen)
    stage = StageBackward([result.square().mean()], None, [x], weights)
    stage.inputs()
    assert seen == ["input"] * 3
    stage.weights()
    assert seen == ["input"] * 3 + ["weight"] * 3


def test_a_stage_that_received_nothing_has_all_in_the_second_half():
    linear = nn.Linear(WIDTH, WIDTH)
    result = linear(torch.randn(4, WIDTH)).sum()
    stage = StageBackward([result], None, [], [linear.weight])
    stage.inputs()
    assert linear.weight.grad is None
    stage.weights()
    assert linear.weight.grad is not None


def test_where_each_half_would_compute_the_forward_again_the_first_one_is_all_of_it():
    linear, runs = nn.Linear(WIDTH, WIDTH), list[int]()

    def forward(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(linear(x))

    x = torch.randn(4, WIDTH).requires_grad_()
    result = checkpoint(forward, x, use_reentrant=False)
    stage = StageBackward([result.sum()], None, [x], [linear.weight, linear.bias], has_halves=False)
    stage.inputs()
    assert x.grad is not None
    assert linear.weight.grad is None
    stage.weights()
    assert linear.weight.grad is not None
    assert len(runs) == 2
