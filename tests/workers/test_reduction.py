"""The canonical tree: equal bits for every world size and every number of micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic.protocol.errors import WrongInput
from elastic.protocol.mesh import microbatch_ids
from tests.workers import where
from tests.workers.fake_groups import run_gloo
from workers.reduction.tree import (
    Block,
    FlatLayout,
    OwningFold,
    TreeFold,
    blocks_of,
    fold_scalars,
)
from workers.reduction.tree_reduction import reduce_tree

SHAPES = [(7, 3), (5,), (), (2, 3, 2)]
on_both = pytest.mark.usefixtures("place")


def _leaves(microbatch_id: int) -> list[Tensor | None]:
    return [t if t is None else t.to(where.current()) for t in _on_host(microbatch_id)]


def _on_host(microbatch_id: int) -> list[Tensor | None]:
    """Gradients of four parameters (some missing, one strided, one bf16) and two buffers."""
    generator = torch.Generator().manual_seed(microbatch_id)
    gradients: list[Tensor | None] = [
        torch.randn(shape, generator=generator) * 10.0 ** (microbatch_id % 5) for shape in SHAPES
    ]
    first = gradients[0]
    assert first is not None
    gradients[0] = first.t().contiguous().t()
    if microbatch_id % 3 == 1:
        gradients[1] = None
    gradients.append(torch.randn(9, generator=generator).bfloat16())
    return [*gradients, torch.randn(6, generator=generator).double(), torch.tensor(0.1).double()]


def _layout(world_size: int) -> FlatLayout:
    here = where.current()
    gradients = {f"p{i}": torch.empty(s, device=here) for i, s in enumerate(SHAPES)}
    gradients["half"] = torch.empty(9, dtype=torch.bfloat16, device=here)
    buffers = {"b0": torch.empty(6, device=here), "b1": torch.empty((), device=here)}
    return FlatLayout(gradients, buffers, world_size)


def _reference(num_microbatches: int, leaf: int) -> Tensor:
    """The tree by its definition, without any of the code under test."""

    def node(level: int, index: int) -> Tensor | None:
        if level == 0:
            if index >= num_microbatches:
                return None
            value = _on_host(index)[leaf]
            if value is None:
                return torch.zeros(SHAPES[leaf])
            return value.float() if value.dtype == torch.bfloat16 else value
        left, right = node(level - 1, 2 * index), node(level - 1, 2 * index + 1)
        return left if right is None or left is None else left + right

    root = node((num_microbatches - 1).bit_length(), 0)
    assert root is not None
    return root


def _reduced(group: Any, num_microbatches: int, steps: int = 1) -> list[bytes]:
    layout = _layout(group.size())
    ids = microbatch_ids(num_microbatches, group.size(), group.rank())
    fold = TreeFold(layout, ids, num_microbatches)
    flats: list[Tensor] = []
    for _ in range(steps):
        fold.begin()
        for i in ids:
            fold.add(i, _leaves(i))
        flats = reduce_tree(group, fold, num_microbatches)
    return [v.contiguous().cpu().numpy().tobytes() for v in layout.views(flats)]


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 16, 17, 23])
def test_sums_are_the_tree_bit_for_bit_at_every_world_size(num_microbatches: int) -> None:
    expected = [
        _reference(num_microbatches, leaf).contiguous().numpy().tobytes() for leaf in range(7)
    ]
    for world_size in range(1, min(num_microbatches, 8) + 1):
        for result in where.run_threads(world_size, lambda g: _reduced(g, num_microbatches)):
            assert result == expected, world_size


@on_both
def test_buffers_are_used_again_in_the_next_step_without_a_trace() -> None:
    for world_size in (1, 3):
        once = where.run_threads(world_size, lambda g: _reduced(g, 7))
        assert where.run_threads(world_size, lambda g: _reduced(g, 7, steps=3)) == once


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_over_gloo_processes_are_the_same_bits(world_size: int, tmp_path: Path) -> None:
    expected = where.run_threads(1, lambda g: _reduced(g, 7))[0]
    assert run_gloo(world_size, tmp_path, lambda g: _reduced(g, 7)) == [expected] * world_size


@on_both
@on_both
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
def test_who_computes_all_ids_adds_the_same_in_the_gradients_themselves(num_microbatches: int):
    count = len(SHAPES) + 1
    like = {str(i): t for i, t in enumerate(_leaves(0)[:count]) if t is not None}
    fold = OwningFold(like, num_microbatches)
    fold.begin()
    fold.add(0, _leaves(0)[:count])  # of an attempt that is given up
    fold.begin()
    for i in range(num_microbatches):
        fold.add(i, _leaves(i)[:count])
    found = [t.contiguous().cpu().numpy().tobytes() for t in fold.release_root()]
    wanted = [_reference(num_microbatches, leaf) for leaf in range(count)]
    assert found == [t.contiguous().numpy().tobytes() for t in wanted]


@on_both
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
def test_who_computes_a_leaf_may_add_it_to_the_one_before_itself(num_microbatches: int):
    """Every other one is added to no other sum first."""
    generator, lent = torch.Generator().manual_seed(0), list[int]()
    leaves = [
        [torch.randn(s, generator=generator).to(where.HERE) for s in SHAPES] for _ in range(8)
    ]
    like = {str(j): t for j, t in enumerate(leaves[0])}
    fold, plain = OwningFold(like, num_microbatches), OwningFold(like, num_microbatches)
    for i in range(num_microbatches):
        sums = fold.lent
        if sums:
            lent.append(i)
        added = {name: sums[name].add_(leaves[i][int(name)]) for name in list(sums)[1:]}
        plain.add(i, [t.clone() for t in leaves[i]])
        fold.add(i, [added.get(str(j), t.clone()) for j, t in enumerate(leaves[i])])
    pairs = zip(fold.release_root(), plain.release_root(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert lent == list(range(1, num_microbatches, 2))


def test_large_buffers_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = where.run_threads(1, lambda g: _reduced(g, 7))[0]
    monkeypatch.setattr("workers.reduction.tree_reduction.PIECE_ELEMENTS", {where.HERE.type: 4})
    for world_size in (2, 3, 5):
        assert where.run_threads(world_size, lambda g: _reduced(g, 7)) == [expected] * world_size


class InFlight:
    """A group that counts the collectives which nobody has waited for yet."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.now = self.most = 0

    is_settled = False

    def all_to_all_flat(self, output: Any, tensor: Any, *sizes: Any) -> "InFlight":
        return self._launched(self._group.all_to_all_flat(output, tensor, *sizes))

    def all_gather_flat(self, output: Any, tensor: Any) -> "InFlight":
        return self._launched(self._group.all_gather_flat(output, tensor))

    def _launched(self, done: Any) -> "InFlight":
        done.wait()
        self.now += 1
        self.most = max(self.most, self.now)
        return self

    def wait(self) -> None:
        self.now -= 1


@on_both
def test_few_pieces_travel_at_a_time_however_large_the_buffers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = where.run_threads(1, lambda g: _reduced(g, 7))[0]
    monkeypatch.setattr("workers.reduction.tree_reduction.PIECE_ELEMENTS", {where.HERE.type: 2})

    def body(group: Any) -> tuple[list[bytes], int, bool]:
        counting = InFlight(group)
        return _reduced(counting, 7), counting.now, counting.most <= 6

    assert where.run_threads(3, body) == [(expected, 0, True)] * 3


@on_both
def test_an_attempt_that_was_given_up_leaves_nothing_behind() -> None:
    layout = _layout(1)
    fold = TreeFold(layout, range(7), 7)
    fold.begin()
    for i in range(5):
        fold.add(i, _leaves(i))
    fold.begin()
    for i in range(7):
        fold.add(i, _leaves(i))
    views = layout.views(fold.release_root())
    assert torch.equal(views[0].cpu(), _reference(7, 0))


@on_both
def test_a_missing_gradient_counts_as_positive_zero_wherever_its_micro_batch_ran() -> None:
    def reduced(group: Any) -> list[str]:
        here = where.current()
        layout = FlatLayout({"p": torch.empty(1, device=here)}, world_size=2)
        fold = TreeFold(layout, microbatch_ids(2, group.size(), group.rank()), 2)
        fold.begin()
        for i in fold.ids:
            fold.add(i, [torch.tensor([-0.0], device=here)] if i == 0 else [None])
        return [str(v) for v in reduce_tree(group, fold, 2)[0][:1].tolist()]

    assert where.run_threads(1, reduced) == [["0.0"]]
    assert where.run_threads(2, reduced) == [["0.0"], ["0.0"]]


def test_blocks_are_the_largest_nodes_and_absent_leaves_belong_to_the_last() -> None:
    assert blocks_of(range(0, 8), 8) == (Block(3, 0),)
    assert blocks_of(range(0, 3), 8) == (Block(1, 0), Block(0, 2))
    assert blocks_of(range(3, 6), 8) == (Block(0, 3), Block(1, 2))
    assert blocks_of(range(4, 5), 5) == (Block(2, 1),)
    assert blocks_of(range(0, 1), 1) == (Block(0, 0),)


def test_few_flat_buffers_are_enough() -> None:
    layout = _layout(1)
    fold = TreeFold(layout, range(64), 64)
    made: list[int] = []
    original, layout.empty = layout.empty, lambda: made.append(1) or original()  # type: ignore
    for _ in range(3):
        fold.begin()
        for i in range(64):
            fold.add(i, _leaves(i))
    assert len(made) <= 7


def test_a_mean_of_equal_floats_is_that_float() -> None:
    layout = FlatLayout({}, {"b": torch.empty(1)})
    for num_microbatches in (3, 7, 11, 13):
        fold = TreeFold(layout, range(num_microbatches), num_microbatches)
        fold.begin()
        for i in range(num_microbatches):
            fold.add(i, [torch.tensor([0.1]).double()])
        mean = layout.views(fold.release_root())[0] / num_microbatches
        assert mean.float().item() == torch.tensor(0.1).item()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    fold = TreeFold(FlatLayout({"table.weight": torch.empty(4, 2)}), range(1), 1)
    with pytest.raises(WrongInput, match=r"table\.weight.*sparse=False"):
        fold.add(0, [torch.zeros(4, 2).to_sparse()])


def test_scalars_go_through_the_same_tree() -> None:
    for count in (1, 2, 3, 5, 8, 13):
        values = np.random.default_rng(count).standard_normal(count).tolist()
        layout = FlatLayout({"x": torch.empty((), dtype=torch.float64)})
        fold = TreeFold(layout, range(count), count)
        fold.begin()
        for i, value in enumerate(values):
            fold.add(i, [torch.tensor(value, dtype=torch.float64)])
        assert fold_scalars(values) == float(fold.release_root()[0][0])
        assert fold_scalars(np.array(values)) == fold_scalars(torch.from_numpy(np.array(values)))
