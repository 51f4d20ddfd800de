"""Committed buffers: restored, averaged, voted on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.protocol.errors import UserError
from elastic.protocol.mesh import microbatch_ids
from tests.workers import where
from workers.reduction.tree import FlatLayout, TreeFold
from workers.reduction.tree_reduction import reduce_tree
from workers.train_state.train_state import TrackedBuffers

pytestmark = pytest.mark.usefixtures("place")


class Counting(nn.Module):
    """Buffers that change in every way there is: in place, anew, through .data; and a mask."""

    mask: Tensor
    mean: Tensor
    anew: Tensor
    hidden: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("anew", torch.ones(1))
        self.register_buffer("hidden", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.anew = self.anew * 0.5 + x.mean()
        self.hidden.data.add_(x.sum())
        self.calls.add_(1)
        return x


def _x(i: int) -> Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(i)).to(where.current())


def counting() -> Counting:
    return Counting().to(where.current())


def _step(buffers: TrackedBuffers, model: nn.Module, group: Any, num_microbatches: int) -> bool:
    """One step as a session makes it; False if buffers had to be tracked first."""
    ids = microbatch_ids(num_microbatches, group.size(), group.rank())
    layout = FlatLayout({}, buffers.floating, group.size())
    fold = TreeFold(layout, ids, num_microbatches)
    fold.begin()
    buffers.begin_step()
    for i in ids:
        buffers.begin_microbatch()
        model(_x(i))
        fold.add(i, buffers.end_microbatch())
    if changed := buffers.untracked_changes():
        buffers.track(changed)
        return False
    assert len(set(buffers.integer_hashes(torch.Tensor.cpu))) == 1
    sums = layout.views(reduce_tree(group, fold, num_microbatches)) if layout.parts else []
    buffers.commit(
        dict(zip(buffers.floating, sums, strict=True)), buffers.integers, num_microbatches
    )
    return True


def _three_steps(group: Any) -> tuple[dict[str, bytes], tuple[str, ...]]:
    model = counting()
    buffers = TrackedBuffers(model)
    assert not _step(buffers, model, group, 7)
    for _ in range(3):
        assert _step(buffers, model, group, 7)
    return {n: b.cpu().numpy().tobytes() for n, b in model.named_buffers()}, buffers.tracked


def test_changed_buffers_are_found_and_averaged_to_the_same_bits_at_every_world_size() -> None:
    expected = where.run_threads(1, _three_steps)[0]
    assert expected[1] == ("anew", "calls", "hidden", "mean")
    for world_size in (2, 3, 5, 7):
        assert where.run_threads(world_size, _three_steps) == [expected] * world_size


def test_the_mean_is_over_micro_batches_that_all_start_from_the_committed_value() -> None:
    model = counting()
    buffers = TrackedBuffers(model, ("anew", "calls", "hidden", "mean"))

    def body(group: Any) -> bool:
        return _step(buffers, model, group, 3)

    assert where.run_threads(1, body) == [True]
    expected = torch.stack([0.1 * _x(i).mean(0) for i in range(3)]).mean(0)
    assert torch.allclose(model.mean, expected)
    assert torch.allclose(model.anew, 0.5 + torch.stack([_x(i).mean() for i in range(3)]).mean())
    assert int(model.calls) == 1
    assert model.anew is dict(model.named_buffers())["anew"]


def test_a_step_given_up_leaves_the_committed_values() -> None:
    model = counting()
    buffers = TrackedBuffers(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    buffers.begin_step()
    buffers.begin_microbatch()
    model(_x(0))
    buffers.end_microbatch()
    buffers.restore()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_batch_norm_is_tracked_from_the_start_even_if_it_is_frozen_now() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), counting()).to(where.HERE).eval()
    buffers = TrackedBuffers(model)
    assert buffers.tracked == ("0.num_batches_tracked", "0.running_mean", "0.running_var")
    assert buffers.integer_names == ("0.num_batches_tracked",)
    model[0].running_mean.fill_(0.1)
    buffers.refresh()
    before = model[0].running_mean.clone()
    for _ in range(20):
        where.run_threads(1, lambda g: _step(buffers, model[0], g, 7))
    assert torch.equal(model[0].running_mean, before)
    model.train()
    where.run_threads(1, lambda g: _step(buffers, model[0], g, 7))
    assert not torch.equal(model[0].running_mean, before)
    assert int(model[0].num_batches_tracked) == 1


def test_integer_buffers_that_depend_on_samples_have_other_hashes() -> None:
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int32))
    model.register_buffer("flag", torch.zeros((), dtype=torch.bool))
    model.to(where.HERE)
    buffers = TrackedBuffers(model, ("seen", "flag"))
    buffers.begin_step()
    for i in range(2):
        buffers.begin_microbatch()
        model.get_buffer("seen").add_(i)
        buffers.end_microbatch()
    (flag_0, seen_0), (flag_1, seen_1) = buffers.integer_hashes(torch.Tensor.cpu)
    assert buffers.integer_names == ("flag", "seen")
    assert flag_0 == flag_1
    assert seen_0 != seen_1
    assert -(2**63) <= seen_0 < 2**63


def test_a_tracked_buffer_that_changes_shape_is_an_error_that_names_it() -> None:
    model = counting()
    buffers = TrackedBuffers(model, ("mean",))
    buffers.begin_step()
    buffers.begin_microbatch()
    model.mean = torch.zeros(5, device=where.HERE)
    with pytest.raises(UserError, match=r"'mean' changed from torch.float32\[2\] to .*\[5\]"):
        buffers.end_microbatch()


def test_a_non_persistent_table_that_grows_is_a_cache_and_not_state() -> None:
    model = counting()
    buffers = TrackedBuffers(model)
    buffers.begin_step()
    buffers.begin_microbatch()
    model.table = torch.ones(9, device=where.HERE)
    buffers.end_microbatch()
    assert not buffers.untracked_changes()
    buffers.begin_microbatch()
    assert model.table.shape == (9,)


def test_a_follower_commits_the_values_that_members_agreed_on() -> None:
    def member(group: Any) -> bool:
        model = counting()
        leader = TrackedBuffers(model, ("anew", "calls", "hidden", "mean"))
        leader.begin_step()
        leader.begin_microbatch()
        model(_x(0))
        leaves = dict(zip(leader.floating, leader.end_microbatch(), strict=True))
        copy = counting()
        follower = TrackedBuffers(copy)
        follower.track(leader.tracked)
        follower.commit(leaves, leader.integers, 1)
        leader.commit(leaves, leader.integers, 1)
        return all(torch.equal(a, b) for a, b in zip(model.buffers(), copy.buffers(), strict=True))

    assert where.run_threads(1, member) == [True]


def test_a_pass_outside_of_steps_leaves_no_trace_in_any_buffer() -> None:
    model = counting()
    buffers = TrackedBuffers(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    buffers.begin_step()
    model(_x(0))
    assert any(not torch.equal(b, before[n]) for n, b in model.named_buffers())
    buffers.restore_all()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert not buffers.untracked_changes()
