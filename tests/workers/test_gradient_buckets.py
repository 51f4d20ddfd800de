"""Fast mode's buckets: the right sums, launched in order, errors out of autograd's reach."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from tests.workers.fake_groups import Done, run_gloo, run_threads
from workers.reduction.fast import GradientBuckets


class Branches(nn.Module):
    """Layers of which some get no gradient: `rare` on rank 1 only, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.rare, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.wide = nn.Linear(8, 1).double()

    def forward(self, x: Tensor, use_rare: bool) -> Tensor:
        y = self.body(x)
        y = self.rare(y) if use_rare else y
        return self.wide(y.double()).mean()


def _batch(i: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i))


def _sums(group: Any, bucket_bytes: int | None = 700, steps: int = 2) -> list[list[float]]:
    model = Branches()
    parameters = dict(model.named_parameters())
    buckets = GradientBuckets(parameters, group, bucket_bytes)
    gradients: list[Tensor | None] = []
    buffers = None
    for _ in range(steps):
        buckets.begin()
        ids = range(group.rank() * 12 // group.size(), (group.rank() + 1) * 12 // group.size())
        for i in ids:
            if i == ids[-1]:
                buckets.arm()
            model(_batch(i), use_rare=i == 11).backward()
            buckets.add_buffers([torch.tensor([float(i)]).double(), torch.ones(2).double()])
        gradients, buffers = buckets.finish()
    buckets.close()
    assert buffers is not None
    assert buffers.tolist() == [66.0, 12.0, 12.0]
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    return [gradients.get(name, zeros[name]).flatten().tolist() for name in parameters]


def _close(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("bucket_bytes", [1, 700, None])
def test_sums_equal_those_of_one_rank(bucket_bytes: int | None, tmp_path: Path) -> None:
    expected = run_threads(1, lambda g: _sums(g))[0]
    results = run_gloo(2, tmp_path, lambda g: _sums(g, bucket_bytes))
    assert results[0] == results[1]
    assert _close(results[0], expected)


def test_three_ranks_and_a_parameter_that_one_rank_uses(tmp_path: Path) -> None:
    expected = run_threads(1, lambda g: _sums(g))[0]
    for result in run_gloo(3, tmp_path, _sums):
        assert _close(result, expected)


class Recording:
    """A group of two that records the launches of this rank."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self.error = error

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def all_reduce(self, tensor: Tensor) -> Done:
        if self.error is not None:
            raise self.error
        self.sizes.append(tensor.numel())
        return Done()

    def all_to_all(self, outputs: Any, inputs: Any) -> Done:
        raise NotImplementedError

    all_gather = all_to_all


def _chain(group: Any) -> tuple[nn.Module, GradientBuckets]:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)])
    buckets = GradientBuckets(dict(model.named_parameters()), group, bucket_bytes=1)
    buckets.begin()
    buckets.arm()
    return model, buckets


def test_buckets_are_launched_while_backward_still_runs() -> None:
    group = Recording()
    model, buckets = _chain(group)
    launched: list[int] = []
    model[0].weight.register_hook(lambda _: launched.append(len(group.sizes)))
    model(torch.randn(2, 4)).sum().backward()
    assert launched == [4]
    buckets.finish()
    assert group.sizes == [16] * 5


def test_nothing_is_launched_before_the_last_backward() -> None:
    group = Recording()
    model, buckets = _chain(group)
    buckets.begin()
    model(torch.randn(2, 4)).sum().backward()
    assert group.sizes == []
    buckets.arm()
    model(torch.randn(2, 4)).sum().backward()
    assert group.sizes == [16] * 5


def test_a_bucket_waits_for_those_before_it() -> None:
    group = Recording()
    model, buckets = _chain(group)
    model[:4](torch.randn(2, 4)).sum().backward()
    assert group.sizes == []
    gradients, _ = buckets.finish()
    assert group.sizes == [16] * 5
    assert not gradients["4.weight"].any()


def test_an_error_in_a_hook_comes_out_of_finish_unchanged() -> None:
    error = ConnectionResetError("peer lost")
    model, buckets = _chain(Recording(error))
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ConnectionResetError) as caught:
        buckets.finish()
    assert caught.value is error


def test_a_second_gradient_after_sending_is_an_error_that_names_the_parameter() -> None:
    model, buckets = _chain(Recording())
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'4\.weight' got a second gradient"):
        buckets.finish()


def test_sparse_gradients_are_refused_by_name() -> None:
    for group in (Recording(), _Alone()):
        table = nn.Embedding(5, 2, sparse=True)
        buckets = GradientBuckets({"table.weight": table.weight}, group)
        buckets.begin()
        buckets.arm()
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(WrongInput, match=r"table\.weight.*sparse=False"):
            buckets.finish()


class _Alone(Recording):
    def size(self) -> int:
        return 1


def test_one_rank_has_no_hooks_and_its_gradients_are_the_parameters_own() -> None:
    group = _Alone()
    model, buckets = _chain(group)
    model(torch.randn(2, 4)).sum().backward()
    gradients, sums = buckets.finish()
    assert all(gradients[name] is p.grad for name, p in model.named_parameters())
    assert (sums, group.sizes) == (None, [])
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
