"""Full state as JSON and named tensors: exact, and clear about what it cannot carry."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, OneCycleLR, SequentialLR

from elastic.protocol.errors import WrongInput
from tests.workers import where
from workers.train_state.digest import weights_sha256
from workers.train_state.serialization import capture, decode, encode, restore
from workers.train_state.snapshot import Snapshot


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.short = nn.Parameter(torch.randn(4).bfloat16())
        self.calls = {"by": Counter(a=1)}

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids))) + self.short.float().sum()

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain_sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.95), amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "nadam": lambda p: torch.optim.NAdam(p),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:], "lr": 3e-4}]
    ),
}
SCHEDULERS = {
    "none": lambda _: None,
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    "multistep": lambda o: MultiStepLR(o, [2, 2, 4], gamma=0.3),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=3), MultiStepLR(o, [1])], milestones=[3]
    ),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=50),
}


def _build(optimizer: str, scheduler: str, seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = Tied().to(where.HERE)
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    return model, made, SCHEDULERS[scheduler](made)


def _train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:
    torch.manual_seed(99)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 11, (8,)).to(where.HERE)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(o, "none") for o in OPTIMIZERS]
    + [("adamw", s) for s in SCHEDULERS]
    + [("groups", "sequential")],
)
def test_a_restored_replica_trains_on_to_the_same_bits(optimizer: str, scheduler: str) -> None:
    source = _build(optimizer, scheduler, seed=0)
    _train(*source, steps=3)
    header, tensors = capture(*source)
    header = json.loads(json.dumps(header))
    target = _build(optimizer, scheduler, seed=1)
    _train(*target, steps=1)
    restore(*target, header, tensors)
    again, tensors_again = capture(*target)
    assert json.loads(json.dumps(again)) == header
    assert tensors.keys() == tensors_again.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == tensors_again[name].dtype
        assert torch.equal(tensor, tensors_again[name]), name
    _train(*source, steps=4)
    _train(*target, steps=4)
    assert weights_sha256(source[0]) == weights_sha256(target[0])


@pytest.mark.usefixtures("place")
def test_a_snapshot_is_a_copy_and_holds_shared_tensors_once() -> None:
    model, optimizer, scheduler = _build("adamw", "none", seed=0)
    _train(model, optimizer, scheduler, steps=1)
    _, tensors = capture(model, optimizer, scheduler)
    before = {n: t.cpu().clone() for n, t in tensors.items()}
    snapshot = Snapshot({}, tensors)
    early = snapshot.take("model/norm.weight")
    snapshot.settle()
    _train(model, optimizer, scheduler, steps=1)
    assert torch.equal(early, before.pop("model/norm.weight"))
    assert all(torch.equal(snapshot.take(name), t) for name, t in before.items())
    assert not all(torch.equal(tensors[name].cpu(), t) for name, t in before.items())
    assert [n for n in tensors if n.startswith("model/")] == [
        "model/short",
        "model/table.weight",
        "model/norm.weight",
        "model/norm.bias",
        "model/scratch",
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
    ]
    assert "optimizer/table.weight/exp_avg" in tensors


@pytest.mark.usefixtures("place")
def test_options_of_an_optimizer_that_are_tensors_come_back_where_they_were() -> None:
    def built(lr: float) -> tuple[nn.Module, Any]:
        model = Tied().to(where.HERE)
        parameters = list(model.parameters())
        options = {
            "lr": torch.tensor(lr, device=where.HERE),
            "betas": (torch.tensor(0.8), torch.tensor(0.95)),
        }
        return model, torch.optim.Adam([{"params": parameters, **options}], foreach=False)

    model, optimizer = built(0.5)
    header, tensors = capture(model, optimizer, None)
    other, restored = built(0.1)
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    restore(other, restored, None, json.loads(json.dumps(header)), on_host)
    (group,) = restored.param_groups
    assert (group["lr"].device, group["lr"].item()) == (where.HERE, 0.5)
    assert (group["betas"][0].device, group["betas"][0].item()) == (where.CPU, torch.tensor(0.8))


def test_values_come_back_with_their_types() -> None:
    value = {
        "a": [1, 0.1, True, None, "x", (1, (2.5,)), []],
        3: {"k": -0.0},
        None: 1e-300,
        (1, 2): Counter({5: 2}),
        "o": OrderedDict(b=1, a=2),
        "n": math.inf,
        "big": 2**70,
        "np": np.float32(0.1),
        "np64": np.float64(0.1),
        "set": {3},
        "float": {"float": 1.5},
        "t": torch.arange(3, dtype=torch.int16),
    }
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "here", tensors), allow_nan=False)
    back = decode(json.loads(text), tensors)
    tensor, returned = value.pop("t"), back.pop("t")
    assert torch.equal(tensor, returned)
    assert tensor.dtype == returned.dtype
    assert repr(back) == repr(value)
    assert math.isnan(decode(encode(math.nan, "", {}), {}))
    assert type(back["np"]) is np.float32
    assert type(back["o"]) is OrderedDict


def test_what_cannot_be_carried_is_named() -> None:
    with pytest.raises(WrongInput, match=r"'scheduler/fn' is a builtins\.function"):
        encode({"fn": lambda: 0}, "scheduler", {})
    model, optimizer, _ = _build("sgd", "none", seed=0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(WrongInput, match=r"group 1 of SGD holds a tensor of shape \[3\]"):
        capture(model, optimizer, None)


def test_a_state_of_another_model_or_optimizer_is_refused_and_says_how() -> None:
    source = _build("adamw", "none", seed=0)
    header, tensors = capture(*source)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="another model"):
        restore(other, torch.optim.SGD(other.parameters(), lr=1.0), None, header, tensors)
    with pytest.raises(ValueError, match="other parameter groups"):
        restore(*_build("groups", "none", seed=0), header, tensors)
    with pytest.raises(ValueError, match="has a scheduler"):
        restore(*_build("adamw", "lambda", seed=0), header, tensors)
    with pytest.raises(ValueError, match=r"'model/short' is torch\.float32"):
        restore(*source, header, {**tensors, "model/short": torch.zeros(4)})


def damaged_headers(header):
    """A field is gone, or is of another kind, at each place of the header."""

    def walk(node, path):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in list(items):
            yield (*path, key)
            if isinstance(item, dict | list):
                yield from walk(item, (*path, key))

    for path in walk(header, ()):
        for change in ("gone", None, "text", [], {}, {"tensor": []}, {"float": {}}):
            copy = json.loads(json.dumps(header))
            node = copy
            for key in path[:-1]:
                node = node[key]
            if change != "gone":
                node[path[-1]] = change
            else:
                del node[path[-1]]
            yield copy


def test_a_header_that_lacks_something_is_wrong_input_and_no_other_error() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    header, tensors = capture(model, optimizer, None)
    tensors = {name: t.clone() for name, t in tensors.items()}
    refused = 0
    for damaged in damaged_headers(json.loads(json.dumps(header))):
        try:
            restore(model, torch.optim.AdamW(model.parameters()), None, damaged, tensors)
        except (WrongInput, ValueError):
            refused += 1
    assert refused > 100
    with pytest.raises(WrongInput, match="it has no dict 'optimizer'"):
        restore(model, optimizer, None, {"extra": {}, "scheduler": None}, tensors)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1, 1, 2), (16, 2, 1)), ((2, 1, 3), (1, 2**40, 2)), ((3, 1), (1, 0)), ((1, 1), (7, 2**62))],
)
def test_strides_come_back_whatever_they_are_where_nothing_is_to_step_over(shape, strides) -> None:
    tensors: dict[str, torch.Tensor] = {}
    given = torch.arange(math.prod(shape)).as_strided(shape, strides)
    told = encode(given, "t", tensors)
    found = decode(told, {"t": tensors["t"].clone(memory_format=torch.contiguous_format)})
    assert torch.equal(found, given)
    assert found.stride() == strides
    with pytest.raises(WrongInput, match="damaged value"):
        decode({**told, "strides": [2**64] * len(shape)}, tensors)


@pytest.mark.parametrize("strides", [[2**40, 1], [0, 0], [1], [1, 1], ["a", 1], [-2, 1], 7])
def test_strides_of_no_dense_tensor_are_damage(strides) -> None:
    told = {"tensor": "t", "device": "cpu", "strides": strides}
    with pytest.raises(WrongInput, match="damaged value"):
        decode(told, {"t": torch.zeros(2, 2)})
    right = {"tensor": "t", "device": "cpu", "strides": [1, 2]}
    assert decode(right, {"t": torch.zeros(2, 2)}).stride() == (1, 2)
