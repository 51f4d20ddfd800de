"""What torch's modules keep to themselves: their own parameters and buffers, as they hold them."""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

BatchNorm = _NormBase
"""What all kinds of batch normalisation are."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Those that it holds itself, by key. To be changed in place: no hook hears of it."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Those that it holds itself, by key. To be changed in place."""
    return module._buffers


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
