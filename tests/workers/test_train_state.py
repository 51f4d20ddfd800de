"""What a replica forgets when a step is given up, and how sums become means."""

import math

import pytest
import torch
from torch import nn

from tests.workers import where
from workers.train_state.train_state import TrainState, Update

pytestmark = pytest.mark.usefixtures("place")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


def make(clip_norm: float | None = None) -> TrainState:
    model = Counting().to(where.HERE)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    named = dict(model.named_parameters())
    return TrainState(model, named, optimizer, None, clip_norm=clip_norm, max_nonfinite=1)


def test_what_a_cut_off_vote_told_some_members_only_is_forgotten() -> None:
    train_state = make()
    train_state.buffers.track(["level"])
    train_state.log_names = ("accuracy",)
    assert (
        train_state.snapshot().header["tracked"],
        train_state.snapshot().header["log_names"],
    ) == (
        [],
        [],
    ), "a newcomer that copies the state now knows what was committed"
    train_state.forget_unagreed()
    assert (train_state.buffers.tracked, train_state.log_names) == ((), ())


def test_what_was_committed_stays_known() -> None:
    train_state = make()
    update = Update(
        step=1,
        is_finite=True,
        divisor=1.0,
        num_microbatches=1,
        gradients={"weight": torch.ones(2, device=where.HERE)},
        buffers={"level": torch.full((2,), 3.0, dtype=torch.float64, device=where.HERE)},
        integers={},
        log_names=("accuracy",),
    )
    train_state.apply(update)
    train_state.buffers.track(["calls"])
    train_state.forget_unagreed()
    assert (train_state.buffers.tracked, train_state.log_names) == (("level",), ("accuracy",))
    assert dict(train_state.model.named_buffers())["level"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("divisor", [1.0, 8.0, 0.25, 3.0, 96.0])
@pytest.mark.parametrize("clip_norm", [None, 0.1, 1e9])
def test_sums_become_means_and_are_clipped_with_the_bits_of_two_passes(divisor, clip_norm) -> None:
    train_state = make(clip_norm)
    torch.manual_seed(0)
    sums = torch.randn(2).to(where.HERE)
    expected = sums / divisor
    if clip_norm is not None:
        norm = math.sqrt(float(sums.double().square().sum())) / divisor
        expected *= min(1.0, clip_norm / (norm + 1e-6))
    update = Update(
        step=1,
        is_finite=True,
        divisor=divisor,
        num_microbatches=1,
        gradients={"weight": sums.clone()},
        buffers={},
        integers={},
        log_names=(),
    )
    before = train_state.parameters["weight"].detach().clone()
    train_state.apply(update)
    assert torch.equal(train_state.parameters["weight"], before - 0.1 * expected)
