"""Fast mode's buckets: the right sums, launched in order, errors out of autograd's reach."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from tests.workers import where
from tests.workers.fake_groups import Done, run_gloo
from workers.reduction.fast import GradientBuckets

on_both = pytest.mark.usefixtures("place")


class Branches(nn.Module):
    """Layers of which some get no gradient: `rare` on rank 1 only, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.rare, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.wide = nn.Linear(8, 1).double()
        generator = torch.Generator().manual_seed(0)  # threads share torch's own
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(drawn / 4)

    def forward(self, x: Tensor, use_rare: bool) -> Tensor:
        y = self.body(x)
        y = self.rare(y) if use_rare else y
        return self.wide(y.double()).mean()


def _batch(i: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, 8, generator=generator).to(where.current())


def _sums(group: Any, bucket_bytes: int | None = 700, steps: int = 2) -> list[list[float]]:
    here = where.current()
    model = Branches().to(here)
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
            sums = torch.tensor([float(i)], device=here), torch.ones(2, device=here)
            buckets.add_buffers([t.double() for t in sums])
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


def _run(world_size: int, folder: Path, body: Any) -> list[Any]:
    """Ranks that are processes; on devices, threads."""
    if where.HERE.type == "cpu":
        return run_gloo(world_size, folder, body)
    return where.run_exchanging(world_size, body)


@on_both
@pytest.mark.parametrize("bucket_bytes", [1, 700, None])
def test_sums_equal_those_of_one_rank(bucket_bytes: int | None, tmp_path: Path) -> None:
    expected = where.run_exchanging(1, lambda g: _sums(g))[0]
    results = _run(2, tmp_path, lambda g: _sums(g, bucket_bytes))
    assert results[0] == results[1]
    assert _close(results[0], expected)


@on_both
def test_three_ranks_and_a_parameter_that_one_rank_uses(tmp_path: Path) -> None:
    expected = where.run_exchanging(1, lambda g: _sums(g))[0]
    for result in _run(3, tmp_path, _sums):
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


def _rows() -> Tensor:
    return torch.randn(2, 4).to(where.HERE)


def _chain(group: Any) -> tuple[nn.Module, GradientBuckets]:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)]).to(where.HERE)
    buckets = GradientBuckets(dict(model.named_parameters()), group, bucket_bytes=1)
    buckets.begin()
    buckets.arm()
    return model, buckets


@on_both
def test_buckets_are_launched_while_backward_still_runs() -> None:
    group = Recording()
    model, buckets = _chain(group)
    launched: list[int] = []
    model[0].weight.register_hook(lambda _: launched.append(len(group.sizes)))
    model(_rows()).sum().backward()
    assert launched == [4]
    buckets.finish()
    assert group.sizes == [16] * 5


@on_both
def test_nothing_is_launched_before_the_last_backward() -> None:
    group = Recording()
    model, buckets = _chain(group)
    buckets.begin()
    model(_rows()).sum().backward()
    assert group.sizes == []
    buckets.arm()
    model(_rows()).sum().backward()
    assert group.sizes == [16] * 5


@on_both
def test_a_bucket_waits_for_those_before_it() -> None:
    group = Recording()
    model, buckets = _chain(group)
    model[:4](_rows()).sum().backward()
    assert group.sizes == []
    gradients, _ = buckets.finish()
    assert group.sizes == [16] * 5
    assert not gradients["4.weight"].any()


@on_both
def test_an_error_in_a_hook_comes_out_of_finish_unchanged() -> None:
    error = ConnectionResetError("peer lost")
    model, buckets = _chain(Recording(error))
    model(_rows()).sum().backward()
    with pytest.raises(ConnectionResetError) as caught:
        buckets.finish()
    assert caught.value is error


@on_both
def test_a_second_gradient_after_sending_is_an_error_that_names_the_parameter() -> None:
    model, buckets = _chain(Recording())
    for _ in range(2):
        model(_rows()).sum().backward()
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


@on_both
def test_one_rank_has_no_hooks_and_its_gradients_are_the_parameters_own() -> None:
    group = _Alone()
    model, buckets = _chain(group)
    model(_rows()).sum().backward()
    gradients, sums = buckets.finish()
    assert all(gradients[name] is p.grad for name, p in model.named_parameters())
    assert (sums, group.sizes) == (None, [])
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
