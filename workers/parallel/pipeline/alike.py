"""What tells that the code of two blocks does the same of the same arguments: modules of the same
classes in the same places, whose attributes have the same values and whose tensors the same shapes.
They may differ in whole numbers that the code does not read (numbers.py).

What depends on which of such blocks it is, and is none of its attributes, is not seen.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from workers.parallel.pipeline.absent import Absent
from workers.parallel.pipeline.numbers import may_differ
from workers.torch_private.modules import attributes_of, own_buffers, own_modules, own_parameters

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""What says all that it is by its value."""


class _Itself:
    """Equal to none but itself, which is kept: nothing else gets its address."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def kind_of(
    block: nn.Module, modules: Iterable[nn.Module], forward: Callable[..., Any]
) -> Hashable:
    """Equal for blocks that do the same if what they read of their numbers is equal.

    modules: all of the block's. forward: the block's own.
    """
    places = {id(module): place for place, module in enumerate(modules)}
    function = getattr(forward, "__func__", None)
    is_method = function is not None and getattr(forward, "__self__", None) is block
    found: list[Any] = [function if is_method else _Itself(forward)]
    for module in modules:
        children = own_modules(module).items()
        found.append(type(module))
        found += [(name, places.get(id(child))) for name, child in children]
        found += [
            (name, int if may_differ(module, value) else _said(value))
            for name, value in attributes_of(module)
            if module is not block or name != "forward"  # a stage has put another one there
        ]
        for held in (own_parameters(module), own_buffers(module)):
            found += [(name, _said(tensor)) for name, tensor in held.items()]
    return tuple(found)


def described(tensor: Tensor) -> Hashable:
    """All but its values."""
    is_absent = isinstance(tensor, Absent)
    return (is_absent, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _said(value: object) -> Hashable:
    """What of an attribute's value counts."""
    if isinstance(value, Tensor):
        return described(value)
    if type(value) in PLAIN:
        return (type(value), value)
    if type(value) is tuple:
        return tuple(map(_said, cast("tuple[object, ...]", value)))
    return _Itself(value)
