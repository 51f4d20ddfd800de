"""Optimizers on shards: the bits of the whole, or a refusal that says why."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from elastic.protocol.errors import WrongInput
from elastic.protocol.layout import Box, Position, TensorLayout
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers import where
from tests.workers.sharded_rig import CPU, Work, build, spec
from workers.parallel.build import build_strategy
from workers.parallel.fsdp2_private.shard_step import ELEMENTWISE, on_shards
from workers.parallel.fsdp2_private.sharded_model import ShardedModel
from workers.tensors.local import check_shard, is_shard, layout_of, local
from workers.train_state.blocks import blocks_of

ROWS, WIDTH = 59, 17
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}


def stepped(
    kind: type, options: dict, rank: int, world_size: int, around: Callable = on_shards
) -> torch.Tensor:
    """Three steps of one linear layer's rows, as this rank has them."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, ROWS, bias=False)
    start = model.weight.detach().clone()
    sharded = ShardedModel(model.to(where.HERE), where.HERE, keeps_parameters=False)
    sharded.reshard(rank, world_size)
    (param,) = sharded.parameters
    each = -(-ROWS // world_size)
    rows = slice(rank * each, min((rank + 1) * each, ROWS))
    local(param.parameter.detach()).copy_(start[rows])
    optimizer = kind([model.weight], **SETTINGS.get(kind.__name__, {}), **options)
    for _ in range(3):
        gradient = torch.randn(ROWS, WIDTH)
        model.weight.grad = param.sharded(gradient[rows].to(where.HERE))
        with around(optimizer):
            optimizer.step()
    state = optimizer.state[model.weight]
    assert list(optimizer.state) == optimizer.param_groups[0]["params"] == [model.weight]
    assert all(is_shard(t) for t in state.values() if t.dim()), "the state is sharded all the same"
    return local(model.weight.detach()).clone()


@pytest.mark.usefixtures("place_slowly")
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda k: k.__name__)
def test_plain_rows_get_the_bits_that_dtensors_get(kind) -> None:
    plain = stepped(kind, {}, 1, 3)
    assert torch.equal(plain, stepped(kind, {}, 1, 3, around=lambda _: nullcontext()))


def sharded_weight() -> nn.Parameter:
    model = nn.Linear(WIDTH, ROWS, bias=False)
    sharded = ShardedModel(model, CPU, keeps_parameters=False)
    sharded.reshard(1, 3)
    return model.weight


class Own(torch.optim.SGD):
    """It may do anything."""


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Own])
def test_a_users_own_code_sees_the_sharded_parameters(kind, has_hook) -> None:
    optimizer = kind([sharded_weight()], lr=0.1)
    if has_hook:
        optimizer.register_step_pre_hook(lambda *_: None)
    with on_shards(optimizer):
        (seen,) = optimizer.param_groups[0]["params"]
    assert is_shard(seen) == (has_hook or kind is Own)


def test_a_step_that_fails_leaves_the_parameters_as_they_were() -> None:
    weight = sharded_weight()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    with pytest.raises(RuntimeError, match="of the user's"), on_shards(optimizer):
        raise RuntimeError("of the user's")
    assert optimizer.param_groups[0]["params"] == [weight]
    assert optimizer.state[weight]["momentum_buffer"] is momentum
    assert list(optimizer.state) == [weight]


@pytest.mark.usefixtures("place_slowly")
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
        build_strategy(Other(), dataclasses.replace(spec("fsdp"), reduction=reduction), CPU)


def test_blocks_are_members_of_lists_that_share_no_parameter_with_others() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = first.weight
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.ModuleList([first, second]), tied, inner)
    assert blocks_of(model) == [second, inner]


@pytest.fixture
def grid():
    """A device mesh of 2 x 2 ranks as rank 1 sees it, with such names of its axes."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=1, world_size=4)
    yield lambda *names: DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=names or None)
    torch.distributed.destroy_process_group()


def on_grid(mesh, shape, *placements):
    options = {"run_check": False, "shape": (4, 6), "stride": (6, 1)}
    return DTensor.from_local(torch.zeros(shape), mesh, placements, **options)


def test_a_tensor_that_two_axes_cut_is_described_by_both(grid):
    """Over 2 x 2 ranks each holds (2, 3) of (4, 6), which no range of rows says."""
    tensor = on_grid(grid("dp_shard@3", "tp@3"), (2, 3), Shard(0), Shard(1))
    layout = layout_of("model/weight", tensor)
    cuts = (("dp_shard", 0), ("tp", 1))
    assert layout == TensorLayout("model/weight", "float32", (4, 6), cuts)
    at = Position(Mesh(Parallel.of("fsdp,tp:2"), 4), 1)
    assert layout.box(at) == Box((0, 3), (2, 3))
    check_shard(local(tensor), layout, layout.box(at))


def test_a_tensor_that_is_not_as_its_layout_says_is_refused(grid):
    at = Position(Mesh(Parallel.of("fsdp,tp:2"), 4), 1)
    tensor = on_grid(grid("dp_shard", "tp"), (1, 6), Shard(0), Shard(0))
    twice = layout_of("w", tensor)
    check_shard(local(tensor), twice, twice.box(at))
    rows = TensorLayout("w", "float32", (4, 6), (("dp_shard", 0),))
    says = r"^w: this rank has \[1, 6\] of \[4, 6\], and its layout says \[0:2, 0:6\]$"
    with pytest.raises(ValueError, match=says):
        check_shard(local(tensor), rows, rows.box(at))


def test_what_an_axis_does_not_cut_is_the_same_along_it(grid):
    tensor = on_grid(grid("dp_shard", "tp"), (2, 6), Shard(0), Replicate())
    assert layout_of("w", tensor).cuts == (("dp_shard", 0),)


@pytest.mark.parametrize(
    ("names", "placements"),
    [
        (("dp_shard", "tp"), (Replicate(), Replicate())),
        (("dp_shard", "tp"), (Shard(0), Partial())),
        ((), (Shard(0), Shard(1))),
    ],
)
def test_a_tensor_whose_boxes_nobody_could_tell_is_refused(grid, names, placements):
    tensor = on_grid(grid(*names), (2, 6), *placements)
    with pytest.raises(ValueError, match=r"^model/weight is \(.*which is no box of it"):
        layout_of("model/weight", tensor)


def test_state_that_is_cut_and_has_no_parameters_shape_is_refused():
    """It could not be sharded again behind a restore."""
    strategy = build("fsdp")
    weight = strategy.train_state.model.embedding.weight.detach()
    moment = strategy.layout("optimizer/embedding.weight/exp_avg", torch.zeros_like(weight))
    assert moment.cuts == (("dp_shard", 0),)
    of_rows = DTensor.from_local(torch.zeros(11), weight.device_mesh, [Shard(0)], run_check=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^optimizer/embedding.weight/row is cut as .* its p"):
            strategy.layout("optimizer/embedding.weight/row", of_rows)
