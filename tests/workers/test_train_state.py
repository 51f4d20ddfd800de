"""What a replica forgets when a step is given up."""

import torch
from torch import nn

from workers.train_state.train_state import TrainState, Update


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


def make() -> TrainState:
    model = Counting()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    named = dict(model.named_parameters())
    return TrainState(model, named, optimizer, None, clip_norm=None, max_nonfinite=1)


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
        gradients={"weight": torch.ones(2)},
        buffers={"level": torch.full((2,), 3.0, dtype=torch.float64)},
        integers={},
        log_names=("accuracy",),
    )
    train_state.apply(update)
    train_state.buffers.track(["calls"])
    train_state.forget_unagreed()
    assert (train_state.buffers.tracked, train_state.log_names) == (("level",), ("accuracy",))
    assert dict(train_state.model.named_buffers())["level"].tolist() == [3.0, 3.0]
