"""A block of another stage: what it returns of arguments of these shapes, and what it draws, is
remembered for a step, so that its code runs once in it for each kind of arguments, and the code of
blocks that are alike (alike.py) in one of them.

Where what it does may depend on what changes within a step other than its modules' attributes, its
code runs each time. How single operations are done without values is absent.py's.
"""

import operator
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from workers.parallel.pipeline.absent import (
    Absent,
    EmptyIsAbsent,
    Watch,
    absent_like,
    draw,
    is_draw_by_shape,
    watched_by,
    watching,
    written_by,
)
from workers.parallel.pipeline.alike import PLAIN, described, kind_of
from workers.parallel.pipeline.numbers import NumbersRead, Place, numbers_of
from workers.parallel.pipeline.trees import tensors_in
from workers.torch_private.dispatch import (
    OpOverload,
    TorchDispatchMode,
    tree_flatten,
    tree_unflatten,
)
from workers.torch_private.modules import has_hooks, held_by

_BY_VALUE = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage"})
"""Of a tensor, that no operation tells of."""


class Unknown(Exception):
    """Arguments or results that are more than shapes and plain values."""


@dataclass(frozen=True, slots=True)
class _Draw:
    func: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class _Same:
    """One of the arguments, which is among the results."""

    position: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one run."""

    leaves: tuple[Any, ...]
    """Of what it returned: absent tensors, plain values, and which arguments."""
    spec: Any
    """Of these; None: it returned one tensor."""
    draws: tuple[_Draw, ...]
    numbers: tuple[tuple[Place, int], ...]
    """That the code has read, of its block."""


class Looks:
    """What was seen in a step of the blocks of other stages."""

    def __init__(self) -> None:
        self.step = 0
        """Counted here."""
        self._seen: dict[Any, dict[Any, list[_Seen]]] = {}

    def forget(self) -> None:
        """A step begins. Any code may do something else from now on: a schedule, a configuration,
        anything that it reads may have changed."""
        self.step += 1
        self._seen.clear()

    def of(self, kind: Any) -> dict[Any, list[_Seen]]:
        """By arguments, of the blocks that are alike; several where these read numbers of theirs
        which differ."""
        return self._seen.setdefault(kind, {})


class RememberedBlock:
    """Of a stage that does not compute it."""

    def __init__(self, block: nn.Module, looks: Looks) -> None:
        self._block, self._looks = block, looks
        self._step = -1
        self._modules: tuple[nn.Module, ...] = ()
        self._had: list[tuple[Any, ...]] = []
        """Their attributes, by which it is alike to others."""
        self._numbers: dict[Place, int] = {}
        self._seen: dict[Any, list[_Seen]] = {}

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `forward` returns of these arguments. NotHere as `forward` raises it."""
        if self._step != self._looks.step or not self._is_as_it_was():
            self._compare(forward)
        try:
            leaves, spec = _flattened(args, kwargs)
            key = (spec, _setting(leaves), *map(_described, leaves))
            seen = next(filter(self._reads_the_same, self._seen.get(key, ())), None)
        except (Unknown, TypeError):  # a tree whose kind has no hash
            with EmptyIsAbsent():
                return forward(*args, **kwargs)
        if seen is not None and not any(map(has_hooks, self._modules[1:])):
            for each in seen.draws:
                draw(each.func, each.args, each.kwargs)
            return _result(seen, leaves)
        return self._look(forward, args, kwargs, leaves, key)

    def _compare(self, forward: Callable[..., Any]) -> None:
        """Find what was seen of blocks like this one."""
        self._step, self._modules = self._looks.step, tuple(self._block.modules())
        self._had = [held_by(module) for module in self._modules]
        self._numbers = numbers_of(self._modules)
        self._seen = self._looks.of(kind_of(self._block, self._modules, forward))

    def _reads_the_same(self, seen: _Seen) -> bool:
        return all(self._numbers[at] == value for at, value in seen.numbers)

    def _is_as_it_was(self) -> bool:
        for module, had in zip(self._modules, self._had, strict=True):
            now = held_by(module)
            if len(now) != len(had) or not all(map(operator.is_, now, had)):
                return False
        return True

    def _look(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[Any], key: Any
    ) -> Any:
        """Run it, and remember it if what it does is told by the key."""
        chance = _chance()
        noting, reads = _Noting(watching()), NumbersRead(self._modules, self._numbers)
        with watched_by(noting), _Reading(noting), _Looking(noting), reads:
            result = forward(*args, **kwargs)
        is_told = noting.is_by_shape and chance == _chance()
        if is_told and self._is_as_it_was() and not any(map(has_hooks, self._modules[1:])):
            try:
                returned, spec = _remembered(result, leaves)
            except Unknown:
                return result
            numbers = tuple((at, self._numbers[at]) for at in reads.found)
            seen = _Seen(returned, spec, tuple(noting.draws), numbers)
            self._seen.setdefault(key, []).append(seen)
        return result


def _flattened(args: Any, kwargs: Any) -> tuple[Sequence[Any], Any]:
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        return args, len(args)
    return tree_flatten((args, kwargs))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return described(value)
    if type(value) not in PLAIN:
        raise Unknown
    return (type(value), value)


def _setting(leaves: Iterable[Any]) -> Any:
    """What of torch's own state decides on results' dtypes."""
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return cast, torch.get_default_dtype()


def _chance() -> Any:
    """Of generators that are not torch's."""
    return random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False))


def _remembered(result: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
    """(leaves, spec) of `_Seen`; Unknown if it is more than what these can say."""
    flat, spec = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
    found: list[Any] = []
    for value in flat:
        position = next((i for i, leaf in enumerate(leaves) if leaf is value), None)
        if isinstance(value, Tensor) and position is not None:
            found.append(_Same(position))
        elif isinstance(value, Absent):
            if value.grad_fn is not None or value.requires_grad:
                raise Unknown
            found.append(value)
        elif type(value) in PLAIN:
            found.append(value)
        else:
            raise Unknown
    return tuple(found), spec


def _result(seen: _Seen, leaves: Sequence[Any]) -> Any:
    found: list[Any] = []
    for leaf in seen.leaves:
        if isinstance(leaf, _Same):
            found.append(leaves[leaf.position])
        else:
            found.append(absent_like(leaf) if isinstance(leaf, Absent) else leaf)
    return found[0] if seen.spec is None else tree_unflatten(found, seen.spec)


# --- while the code runs ------------------------------------------------------------------------
class _Noting(Watch):
    """What is drawn, and whether the shapes of its arguments tell what the code does."""

    def __init__(self, inner: Watch) -> None:
        self._inner, self.draws = inner, list[_Draw]()
        self.is_by_shape = True

    def on_write(self, real: list[Tensor]) -> None:
        self.is_by_shape = False
        self._inner.on_write(real)

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._inner.on_operation(func, args, kwargs, result)

    def on_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        self._inner.on_draw(func, args, kwargs)
        self.is_by_shape &= all(isinstance(t, Absent) for t in tensors_in((args, kwargs)))
        self.draws.append(_Draw(func, args, kwargs))

    def on_real(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation of tensors that are all here."""
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        if is_draw and is_draw_by_shape(func) and not tensors_in((args, kwargs)):
            self.draws.append(_Draw(func, args, kwargs))
        elif is_draw or not _BY_VALUE.isdisjoint(func.tags) or written_by(func, args, kwargs):
            self.is_by_shape = False


class _Looking(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, noting: _Noting) -> None:
        super().__init__()
        self._noting = noting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            self._noting.is_by_shape = False
        elif Absent not in types:
            self._noting.on_real(func, args, kwargs)
        return func(*args, **kwargs)


class _Reading(EmptyIsAbsent):
    """Sees what is no operation, too."""

    def __init__(self, noting: _Noting) -> None:
        super().__init__()
        self._noting = noting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._noting.is_by_shape = False
        return super().__torch_function__(func, types, args, kwargs)
