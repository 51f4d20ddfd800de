"""What a replica forgets when a step is given up."""

import torch
from torch import nn

from workers.train_state.train_state import Replica, Update


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))


def make() -> Replica:
    model = Counting()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return Replica(model, parameters, optimizer, None, clip_norm=None, max_nonfinite=1)


def test_what_a_cut_off_vote_told_some_members_only_is_forgotten() -> None:
    replica = make()
    replica.buffers.track(["level"])
    replica.log_names = ("accuracy",)
    assert (replica.snapshot().header["tracked"], replica.snapshot().header["log_names"]) == (
        [],
        [],
    ), "a newcomer that copies the state now knows what was committed"
    replica.forget_unagreed()
    assert (replica.buffers.tracked, replica.log_names) == ((), ())


def test_what_was_committed_stays_known() -> None:
    replica = make()
    update = Update(
        step=1,
        is_finite=True,
        divisor=1.0,
        num_microbatches=1,
        used=(True,),
        gradients=(torch.ones(2),),
        buffers=(torch.full((2,), 3.0, dtype=torch.float64),),
        integers=(),
        tracked=("level",),
        log_names=("accuracy",),
    )
    replica.apply(update)
    replica.buffers.track(["calls"])
    replica.forget_unagreed()
    assert (replica.buffers.tracked, replica.log_names) == (("level",), ("accuracy",))
    assert dict(replica.model.named_buffers())["level"].tolist() == [3.0, 3.0]
