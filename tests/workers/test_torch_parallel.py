"""torch's tensor parallelism and pipeline stages over a generation's group, in real processes."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from elastic.protocol.errors import PeerLost
from tests.workers import where
from tests.workers.ranks import Ranks, run_ranks
from workers.distributed.device_mesh import default_group, device_mesh
from workers.distributed.process_group import Group, leave

CPU = torch.device("cpu")
QUICK_S = 60.0
"""A wait that is given up ends in milliseconds; the rest is for a busy machine."""


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def seeded(build: Any) -> Any:
    torch.manual_seed(5)
    return build()


def sum_of(gradient: Any) -> float:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return float(whole.double().pow(2).sum())


def batch(rows: int = 12) -> torch.Tensor:
    drawn = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return drawn.to(where.HERE)


def tensor_parallel(group: Group, on_forward: Any = lambda: None) -> list[float]:
    """Colwise and rowwise over the whole group: the output and all gradients, as squares."""
    model, ranks = seeded(Feed).to(where.HERE), torch.arange(group.size())
    mesh = device_mesh(where.HERE, group, {"tp": group}, ranks)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    source = 0 if where.HERE.type == "cpu" else None  # the simulated device has no scatter
    with default_group(group):
        parallelize_module(model, mesh, plan, src_data_rank=source)
        on_forward()
        y = model(batch())
        y.square().mean().backward()
        return [sum_of(y.detach()), *(sum_of(p.grad) for p in model.parameters())]


def unsharded() -> list[float]:
    model = seeded(Feed)
    y = model(batch())
    y.square().mean().backward()
    return [sum_of(y.detach()), *(sum_of(p.grad) for p in model.parameters())]


def pipeline(group: Group, on_forward: Any = lambda: None) -> list[float]:
    """1F1B over as many stages as ranks: this stage's gradients, and at last the losses."""
    layers = seeded(lambda: [Feed() for _ in range(group.size())])
    stage_module = layers[group.rank()]
    stage_module.register_forward_hook(lambda *_: on_forward())
    losses: list[torch.Tensor] = []
    with default_group(group):
        stage = PipelineStage(stage_module, group.rank(), group.size(), CPU, group=group)
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
        if group.rank() == 0:
            schedule.step(batch())
        else:
            schedule.step(target=batch() * 2, losses=losses)
    squares = [sum_of(p.grad) for p in stage_module.parameters()]
    return squares + [float(loss.detach()) for loss in losses]


def unstaged(num_stages: int) -> list[list[float]]:
    layers = seeded(lambda: [Feed() for _ in range(num_stages)])
    model, found = nn.Sequential(*layers), []
    for x, target in zip(batch().chunk(4), (batch() * 2).chunk(4), strict=True):
        loss = (model(x) - target).square().mean()
        (loss / 4).backward()
        found.append(float(loss.detach()))
    squares = [[sum_of(p.grad) for p in layer.parameters()] for layer in layers]
    return [*squares[:-1], squares[-1] + found]


def test_tensor_parallelism_and_a_pipeline_have_the_gradients_of_one_process():
    def body(ranks: Ranks) -> Any:
        group = ranks.form(1, [0, 1])
        return tensor_parallel(group), pipeline(group)

    results = run_ranks(2, body)
    assert [r[0] for r in results] == [pytest.approx(unsharded(), rel=1e-5)] * 2
    assert [r[1] for r in results] == [pytest.approx(s, rel=1e-5) for s in unstaged(2)]


@pytest.mark.slow
@pytest.mark.usefixtures("on_device")
def test_tensor_parallelism_over_devices_has_the_gradients_of_one_process():
    results = run_ranks(2, lambda ranks: tensor_parallel(ranks.form(1, [0, 1])))
    with where.on_cpu():
        assert results == [pytest.approx(unsharded(), rel=1e-5)] * 2


WAYS = {"tensor": tensor_parallel, "pipeline": pipeline}


def lost_in(ranks: Ranks, way: str, group: Group, on_forward: Any) -> tuple[str, float]:
    """What a survivor's way ends with, and how long after the death. A thread gives the group up as
    a worker's link does, once a survivor says that a peer is lost."""

    def listen() -> None:
        ranks.hear(f"{way}/lost")
        group.abandon()

    threading.Thread(target=listen, daemon=True).start()
    try:
        WAYS[way](group, on_forward)
    except PeerLost as error:
        now = time.monotonic()
        ranks.say(f"{way}/lost")
        return type(error).__name__, now - float(ranks.hear(f"{way}/died"))
    return "nothing", 0.0


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_killed_in_the_middle_is_a_peer_lost_and_the_survivors_go_on(way: str):
    """Nothing is patched: the error comes through torch's own code."""

    def body(ranks: Ranks) -> Any:
        num_forwards = 0

        def die() -> None:
            nonlocal num_forwards
            num_forwards += 1
            if ranks.index == 2 and num_forwards == {"tensor": 1, "pipeline": 3}[way]:
                ranks.say(f"{way}/died", str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)

        group = ranks.form(1, [0, 1, 2])
        ended = lost_in(ranks, way, group, die)
        dead_name = group.group_name
        leave(group)
        group = ranks.form(2, [0, 1])
        assert group.group_name != dead_name
        return *ended, tensor_parallel(group), pipeline(group)

    for stage, found in enumerate(run_ranks(3, body, killed=[2])):
        kind, after_s, tensor, staged = found
        assert (kind, after_s < QUICK_S) == ("PeerLost", True)
        assert tensor == pytest.approx(unsharded(), rel=1e-5)
        assert staged == pytest.approx(unstaged(2)[stage], rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_in_torch_s_code_for_a_peer_that_does_not_come_can_be_given_up(way: str):
    """As for a frozen peer, which no backend tells of."""

    def body(ranks: Ranks) -> Any:
        group = ranks.form(1, [0, 1])
        if ranks.index == 1:
            ranks.hear("over")
            return None
        began = time.monotonic()
        threading.Timer(0.5, group.abandon).start()
        with pytest.raises(PeerLost, match="given up"):
            WAYS[way](group)
        waited_s = time.monotonic() - began
        ranks.say("over")
        return waited_s

    waited_s, _ = run_ranks(2, body)
    assert 0.4 < waited_s < QUICK_S
