"""What torch's modules keep to themselves: their own parameters and buffers, as they hold them."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

BatchNorm = _NormBase
"""What all kinds of batch normalisation are."""
_EVERY_MODULES = frozenset(vars(nn.Module()))
"""Attributes by name."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Those that it holds itself, by key. To be changed in place: no hook hears of it."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Those that it holds itself, by key. To be changed in place."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Its children, by key."""
    return module._modules


def move_what_is_made(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, but what is on the meta device stays there."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """By name: whether it trains, and what every module has not."""
    yield "training", module.training
    for name, value in vars(module).items():
        if name not in _EVERY_MODULES:
            yield name, value


def is_persistent(module: nn.Module, key: str) -> bool:
    """Whether its own buffer belongs to a state dict."""
    return key not in module._non_persistent_buffers_set


def has_child(module: nn.Module, name: str) -> bool:
    """Also of one whose constructor has raised."""
    return name in module._modules


def has_hooks(module: nn.Module) -> bool:
    """Somebody is called before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """By its own `compile()`."""
    return module._compiled_call_impl is not None


def list_weights_anew(layer: nn.RNNBase) -> None:
    """A recurrent layer's list of its parameters is as its attributes are now."""
    names = cast(list[str], layer._flat_weights_names)
    layer._flat_weights[:] = [getattr(layer, name) for name in names]


def held_by(module: nn.Module) -> tuple[Any, ...]:
    """All its attributes, then its own parameters and buffers."""
    held = vars(module)
    return (*held.values(), *held["_parameters"].values(), *held["_buffers"].values())
