"""How long stages wait for each other, with blocks that sleep: the closed form, and no more."""

import time

import pytest
import torch
from torch import Tensor, nn

from tests.workers.pipeline_models import LENGTHS, Case
from tests.workers.pipeline_ranks import Trained, groups_in
from tests.workers.ranks import Ranks, run_ranks

FORWARD_S, BACKWARD_S = 0.08, 0.16
NUM_BLOCKS, STEPS = 4, 5
NUM_MICROBATCHES = len(LENGTHS)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S / NUM_BLOCKS)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S / NUM_BLOCKS)
        return gradient


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return Sleep.apply(x) if type(x) is Tensor else x


CASE = Case(
    lambda: nn.Sequential(*(Sleeper() for _ in range(NUM_BLOCKS))),
    lambda generator, index: torch.randn(2, 4, generator=generator),
    lambda model, batch: (model(batch).square().mean(), None),
)


def closed_form_s(depth: int, num_microbatches: int) -> float:
    return (num_microbatches + depth - 1) * (FORWARD_S + BACKWARD_S) / depth


def step_s(depth: int, schedule: str, num_microbatches: int = NUM_MICROBATCHES) -> float:
    """Of the slowest rank; without what comes before the first step and behind the last."""

    def body(ranks: Ranks) -> float:
        groups = groups_in(ranks.form(0, list(range(depth))))
        trained, times = Trained(CASE), list[float]()
        trained.batches *= num_microbatches // NUM_MICROBATCHES
        trained.train(groups, depth, 1, schedule)
        for num_steps in (1, STEPS):
            began = time.monotonic()
            trained.train(groups, depth, num_steps, schedule)
            times.append(time.monotonic() - began)
        return (times[1] - times[0]) / (STEPS - 1)

    return max(run_ranks(depth, body))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("depth", [2, 4])
def test_a_step_takes_what_the_closed_form_says(depth: int, schedule: str):
    """(m + p - 1) times a stage, and what a busy machine adds: without overlap, p * m of them."""
    took_s = step_s(depth, schedule)
    expected_s = closed_form_s(depth, NUM_MICROBATCHES)
    print(f"pp:{depth} {schedule}: {took_s:.4f} s, closed form {expected_s:.4f} s")
    assert 0.98 * expected_s <= took_s < 1.3 * expected_s
