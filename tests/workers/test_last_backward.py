"""Bitwise sums travel while the last backward runs, and have the bits of those that do not."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.protocol.errors import WrongInput
from elastic.protocol.mesh import microbatch_ids
from tests.workers import where
from workers.reduction.bitwise import BitwiseReducer
from workers.reduction.reducers import Reduced

pytestmark = pytest.mark.usefixtures("place")


class Counting:
    """A group that counts its collectives."""

    def __init__(self, group: Any) -> None:
        self._group, self.num_launched = group, 0
        self.rank, self.size = group.rank, group.size

    def all_to_all_flat(self, *arguments: Any) -> Any:
        self.num_launched += 1
        return self._group.all_to_all_flat(*arguments)

    def all_gather_flat(self, *arguments: Any) -> Any:
        self.num_launched += 1
        return self._group.all_gather_flat(*arguments)

    def all_reduce(self, *arguments: Any) -> Any:
        self.num_launched += 1
        return self._group.all_reduce(*arguments)


class Net(nn.Module):
    """The middle layer is used by odd micro-batches only, one parameter by none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, microbatch_id: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh() if i != 1 or microbatch_id % 2 else x
        return x


def batch_of(step: int, microbatch_id: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + microbatch_id)
    return torch.randn(3, 5, generator=generator).to(where.current())


def filled(model: nn.Module) -> nn.Module:
    """On this thread's device, with the same weights on every thread: they share torch's
    generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model.to(where.current())


def reducer_of(model: nn.Module, group: Any, num_microbatches: int) -> tuple[BitwiseReducer, range]:
    ids = microbatch_ids(num_microbatches, group.size(), group.rank())
    buffer = {"b": summand(0)}
    parameters = dict(model.named_parameters())
    return BitwiseReducer(parameters, buffer, group, ids, num_microbatches), ids


def summand(value: int) -> torch.Tensor:
    return torch.full((3,), float(value), dtype=torch.float64, device=where.current())


def summed(reduced: Reduced) -> list[bytes]:
    sums = (*reduced.gradients.values(), *reduced.buffers.values())
    return [t.cpu().numpy().tobytes() for t in sums]


def steps(group: Any, num_microbatches: int, count: int = 3) -> list[list[bytes]]:
    """The sums of each step."""
    model = filled(Net())
    reducer, ids = reducer_of(model, group, num_microbatches)
    done = []
    for step in range(count):
        reducer.begin()
        for i in ids:
            reducer.before_backward(i == ids[-1])
            model(batch_of(step, i), i).square().sum().backward()
            reducer.after_backward(i, [summand(i)])
        done.append(summed(reducer.finish()))
    reducer.close()
    return done


@pytest.mark.parametrize("shared", [0, 1 << 14])
@pytest.mark.parametrize("num_microbatches", [2, 3, 5, 8])
def test_what_travels_during_the_backward_has_the_bits_of_one_rank(
    num_microbatches: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.reduction.tree_reduction.PIECE_ELEMENTS", {where.HERE.type: 8})
    small = {where.HERE.type: shared}
    monkeypatch.setattr("workers.reduction.tree_reduction.SHARED_ELEMENTS", small)
    alone = where.run_exchanging(1, lambda g: steps(g, num_microbatches))[0]
    for world_size in range(2, min(num_microbatches, 4) + 1):
        for of_rank in where.run_exchanging(world_size, lambda g: steps(g, num_microbatches)):
            assert of_rank == alone


@pytest.mark.parametrize("world_size", [2, 4])
def test_pieces_leave_before_the_backward_ends_and_their_gradients_are_freed(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.reduction.tree_reduction.PIECE_ELEMENTS", {where.HERE.type: 8})
    for of_rank in where.run_exchanging(world_size, on_the_way):
        assert all(launched > 0 and are_free for launched, are_free in of_rank[1:]), of_rank


def on_the_way(group: Any) -> list[tuple[int, bool]]:
    """Of each step: the collectives before its last backward was over, and whether a gradient was
    freed by then."""
    model = filled(nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))))
    counting = Counting(group)
    reducer, ids = reducer_of(model, counting, 8)
    done = []
    for step in range(3):
        reducer.begin()
        counting.num_launched = 0
        for i in ids:
            reducer.before_backward(i == ids[-1])
            model(batch_of(step, i)).square().sum().backward()
            if i == ids[-1]:
                done.append((counting.num_launched, model[3].weight.grad is None))
            reducer.after_backward(i, [summand(0)])
        reducer.finish()
    return done


class Twice(nn.Module):
    """A layer in two reentrant checkpoints: two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_parameter_with_two_gradients_in_a_backward_is_summed_after_it(monkeypatch) -> None:
    monkeypatch.setattr("workers.reduction.tree_reduction.PIECE_ELEMENTS", {where.HERE.type: 8})

    def body(group: Any) -> list[list[bytes]]:
        model = filled(Twice())
        reducer, ids = reducer_of(model, group, 2)
        done = []
        for step in range(3):
            reducer.begin()
            for i in ids:
                reducer.before_backward(i == ids[-1])
                model(batch_of(step, i)).square().sum().backward()
                reducer.after_backward(i, [summand(0)])
            done.append(summed(reducer.finish()))
        return done

    (one,) = where.run_exchanging(1, body)
    assert where.run_exchanging(2, body) == [one] * 2


def test_what_a_gradient_raises_on_its_way_is_raised_where_the_step_is_finished() -> None:
    def body(group: Any) -> str:
        model = filled(nn.Embedding(4, 2, sparse=True))
        reducer, ids = reducer_of(model, group, 2)
        reducer._may_overlap = True
        reducer.begin()
        reducer.before_backward(True)
        model(torch.tensor([1], device=where.current())).sum().backward()
        reducer.after_backward(ids[0], [summand(0)])
        with pytest.raises(WrongInput, match=r"weight.*sparse=False"):
            reducer.finish()
        return "refused"

    with where.on_cpu():  # the simulated device has no sparse tensors
        assert where.run_exchanging(2, body) == ["refused"] * 2
