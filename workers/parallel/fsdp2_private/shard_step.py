"""The optimizer's step on a rank's shards as plain tensors.

Elementwise, it is the same step, bit for bit. Through DTensor the first one of each new world size
derives the sharding of every operation anew: 0.16 s for 19 million parameters in 40 tensors.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks_of_all
from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks_of_all

from elastic.protocol.errors import WrongInput
from workers.tensors.local import is_shard, like, local
from workers.train_state.build import Settings

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
)
"""Whose step on a shard gives the bits of the step on the whole (tests/workers/test_shards.py)."""


def check_shardable(optimizer: optim.Optimizer, spec: Settings) -> None:
    """WrongInput for an optimizer whose step on shards would not be the step on the whole."""
    kind = type(optimizer).__name__
    if optimizer.state:
        raise WrongInput(
            f"{kind} makes its state before the first step, which cannot be sharded; use one of "
            f"{', '.join(o.__name__ for o in ELEMENTWISE)}"
        )
    if kind in ("Muon", "Adafactor"):
        raise WrongInput(
            f"{kind} needs whole tensors, but parallel='{spec.parallel}' shards them; use another "
            "optimizer, or parallel='ddp'"
        )
    if spec.reduction != "bitwise":
        return
    if not isinstance(optimizer, ELEMENTWISE):
        raise WrongInput(
            f"{kind} is not known to be elementwise, which reduction='bitwise' with parallel="
            f"'{spec.parallel}' needs; use one of {', '.join(o.__name__ for o in ELEMENTWISE)}, "
            "or reduction='fast'"
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise WrongInput(
            f"{kind}(fused=True) rounds by an element's place in its shard; leave fused out, or "
            "use reduction='fast'"
        )


@contextmanager
def on_shards(optimizer: optim.Optimizer) -> Generator[None]:
    """Inside, `optimizer` has this rank's shards of its parameters, gradients and state.

    Optimizers of other classes, and those with hooks of the user's, keep their DTensors: what they
    look at is not known.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    whole: list[list[Tensor]] = [group["params"] for group in groups]
    if not _sees_shards(optimizer) or not any(is_shard(p) for of_group in whole for p in of_group):
        yield
        return
    shards = {p: local(p).detach() for of_group in whole for p in of_group}
    known: dict[Tensor, dict[str, Any]] = {p: optimizer.state.pop(p, {}) for p in shards}
    try:
        for group, of_group in zip(groups, whole, strict=True):
            group["params"] = [shards[p] for p in of_group]
        for p, of_rank in shards.items():
            of_rank.grad = None if p.grad is None else local(p.grad)
            if known[p]:
                optimizer.state[of_rank] = {k: _shard(v) for k, v in known[p].items()}
        yield
    finally:
        for group, of_group in zip(groups, whole, strict=True):
            group["params"] = of_group
        for p, of_rank in shards.items():
            if found := optimizer.state.pop(of_rank, {}):
                optimizer.state[p] = {k: _whole(v, known[p].get(k), p) for k, v in found.items()}


def _sees_shards(optimizer: Any) -> bool:
    its_own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = (*its_own, pre_hooks_of_all, post_hooks_of_all)
    return type(optimizer) in ELEMENTWISE and not any(hooks)


def _shard(value: Any) -> Any:
    return local(value) if isinstance(value, Tensor) else value


def _whole(value: Any, before: Any, parameter: Tensor) -> Any:
    """before: what it was when the step began; new state of the parameter's shape is sharded as
    the parameter is."""
    if isinstance(before, Tensor) and local(before) is value:
        return before
    if not isinstance(value, Tensor) or not is_shard(parameter) or not value.dim():
        return value
    return like(value, parameter) if value.shape == local(parameter).shape else value


def step_on_shards(optimizer: optim.Optimizer) -> None:
    with on_shards(optimizer):
        optimizer.step()
