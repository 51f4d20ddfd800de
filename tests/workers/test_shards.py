"""Optimizers on shards: the bits of the whole, or a refusal that says why."""

import dataclasses

import pytest
import torch
from torch import nn

from elastic.protocol.errors import WrongInput
from tests.workers.sharded_rig import CPU, Work, spec
from workers.build import ELEMENTWISE, build_replica
from workers.parallel.blocks import blocks_of
from workers.parallel.sharded_model import ShardedModel
from workers.parallel.shards import local

ROWS, WIDTH = 59, 17
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


def stepped(kind: type, options: dict, rank: int, world_size: int) -> torch.Tensor:
    """Three steps of one linear layer's rows, as this rank has them."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    start = model.weight.detach().clone()
    sharded = ShardedModel(model, CPU, keeps_parameters=False)
    sharded.reshard(rank, world_size)
    (param,) = sharded.params()
    each = -(-ROWS // world_size)
    rows = slice(rank * each, min((rank + 1) * each, ROWS))
    local(param.sharded_param.detach()).copy_(start[rows])
    optimizer = kind([model.weight], **SETTINGS.get(kind.__name__, {}), **options)
    for _ in range(3):
        gradient = torch.randn(ROWS, WIDTH)
        model.weight.grad = param.to_sharded_dtensor(gradient[rows].contiguous())
        optimizer.step()
    return local(model.weight.detach()).clone()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda k: k.__name__)
def test_an_elementwise_optimizer_gives_a_shard_the_bits_of_the_whole(kind, foreach) -> None:
    whole = stepped(kind, {"foreach": foreach}, 0, 1)
    for world_size in (2, 3, 4):
        parts = [stepped(kind, {"foreach": foreach}, r, world_size) for r in range(world_size)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("make", "reduction", "reason"),
    [
        (lambda p: torch.optim.Adafactor(p), "fast", "Adafactor needs whole tensors"),
        (lambda p: torch.optim.Adagrad(p), "fast", "makes its state before the first step"),
        (lambda p: torch.optim.AdamW(p, fused=True), "bitwise", "rounds by an element's place"),
        (
            lambda p: type("Own", (torch.optim.Optimizer,), {})(p, {"lr": 1.0}),
            "bitwise",
            "elementwise",
        ),
    ],
)
def test_an_optimizer_that_a_shard_would_mislead_is_refused_at_start(make, reduction, reason):
    class Other(Work):
        def build_model(self):
            return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

        def build_optimizer(self, params):
            return make(params)

    with pytest.raises(WrongInput, match=reason):
        build_replica(Other(), dataclasses.replace(spec("fsdp"), reduction=reduction), CPU)


def test_blocks_are_members_of_lists_that_share_no_parameter_with_others() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = first.weight
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.ModuleList([first, second]), tied, inner)
    assert blocks_of(model) == [second, inner]
