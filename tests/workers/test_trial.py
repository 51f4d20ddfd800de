"""An optimizer whose state nobody else could take over is refused before step 1."""

from collections import deque

import pytest
import torch
from torch import nn

from elastic.protocol.errors import WrongInput
from tests.workers import where
from tests.workers.session_rig import Tiny, spec
from workers.parallel.ddp import build_replica
from workers.train_state.serialization import capture
from workers.train_state.train_state import TrainState
from workers.train_state.trial import try_optimizer

pytestmark = pytest.mark.usefixtures("place")


class Remembers(torch.optim.SGD):
    """Keeps the last norms of each parameter, in a `deque` or a list."""

    def __init__(self, params, kind, **settings):
        super().__init__(params, **settings)
        self.kind = kind

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("norms", self.kind()).append(float(p.detach().norm()))


class Workload(Tiny):
    def __init__(self, kind):
        self.kind = kind

    def build_model(self):
        return nn.Linear(4, 1)

    def build_optimizer(self, params):
        return Remembers(params, self.kind, lr=0.1, momentum=0.9)


def with_gradients(workload: Workload) -> TrainState:
    train_state = build_replica(workload, spec(), where.HERE)
    train_state.model(torch.ones(2, 4, device=where.HERE)).sum().backward()
    return train_state


def test_state_that_cannot_be_carried_is_refused_with_its_optimizer_and_key():
    train_state = with_gradients(Workload(deque))
    with pytest.raises(
        WrongInput, match=r"Remembers cannot be kept.*'optimizer/weight/norms'"
    ) as e:
        try_optimizer(Workload(deque), spec(), train_state)
    assert "is a collections.deque, which cannot be carried" in str(e.value)


def test_nothing_stays_of_the_trial():
    train_state = with_gradients(Workload(list))
    before = {
        n: t.clone() for n, t in capture(train_state.model, train_state.optimizer, None)[1].items()
    }
    try_optimizer(Workload(list), spec(), train_state)
    after = capture(train_state.model, train_state.optimizer, None)[1]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not train_state.optimizer.state
