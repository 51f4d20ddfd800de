"""Tensors that are somewhere else: shape, dtype and device, and no memory.

A stage runs the user's code for the whole model. Parameters of other stages are absent, and so is
whatever is computed from them; where the user's code cannot do without a value, it is told, with
its line. Which parameters are absent is chain.py's and stage.py's business.
"""

import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.parallel.pipeline.trees import tensors_in
from workers.torch_private.dispatch import (
    ITEM,
    schema_of,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from workers.torch_private.tensors import PLAIN_FUNCTIONS, without_storage

MOST_KNOWN = 10_000
"""Operations whose results' shapes are remembered: a shape that varies makes new ones."""
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_A_USERS = str(Path(__file__).parents[2] / "workloads")
_aten = torch.ops.aten
_RUNNING_STATISTICS = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.cudnn_batch_norm.default: (3, 4),
    _aten.miopen_batch_norm.default: (3, 4),
}
"""Positions of what these write without their schema saying so, if they train."""
_DRAW_BY_SHAPE = frozenset(
    {
        "alpha_dropout", "bernoulli", "cauchy", "dropout", "exponential", "feature_alpha_dropout",
        "feature_dropout", "geometric", "log_normal", "native_dropout", "normal",
        "normal_functional", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "random", "randperm", "uniform", "_fused_dropout", "gru", "lstm", "rnn_relu", "rnn_tanh",
        "_cudnn_rnn", "miopen_rnn", "scaled_dot_product_attention", "_fused_sdp_choice",
        "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)  # fmt: skip
"""Operations that draw as many random numbers for zeros as for any other values, also in place."""


class NotHere(Exception):
    """The user's code cannot do without a value that is on another stage. Begins in the middle of a
    sentence about that code: "asks for a value of ..."."""


class Absent(Tensor):
    """See the module. Made by `absent` and `absent_like`."""

    name: str = ""
    """Of the parameter or buffer whose place it takes; empty: it was computed."""
    described: "_Described"

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Absent":
        shape, strides = tuple(shape), tuple(strides)
        made = without_storage(cls, shape, strides=strides, dtype=dtype, device=device)
        made.described = (shape, strides, dtype)
        return made

    __torch_function__ = PLAIN_FUNCTIONS

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return format(AbsentNumber(), format_spec) if self.dim() == 0 else repr(self)

    def __bool__(self) -> NoReturn:
        refuse("asks for a value of a tensor that is on another stage")

    __int__ = __float__ = __index__ = __complex__ = __bool__
    tolist = numpy = __array__ = __bool__  # pyright: ignore[reportAssignmentType]

    def __contains__(self, element: Any, /) -> bool:
        return self.__bool__()

    def item(self) -> "AbsentNumber":
        return AbsentNumber({_watch.place})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ITEM:
            refuse("asks for a value of a tensor that is on another stage")
        traits = _traits.get(func) or _traits.setdefault(func, _Traits.of(func))
        written = traits.written(args, kwargs) if traits.writes else []
        real = [t for t in written if not isinstance(t, Absent)]
        if real:
            _watch.on_write(real)
        if traits.draws:
            _watch.on_draw(func, args, kwargs)
        result = _results(func, args, kwargs)
        _watch.on_operation(func, args, kwargs, result)
        return written[0] if traits.is_in_place and isinstance(result, Tensor) else result

    def __deepcopy__(self, memo: Any) -> "Absent":
        return absent_like(self, name=self.name)

    def pin_memory(self, device: Any = None) -> "Absent":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an absent tensor has no values to be saved")


class AbsentNumber(float):
    """A value that is not here, as a number: it can be printed and logged, and prints as nan. No
    decision can be made of it."""

    places: frozenset[int]
    """Where it was asked for, see `Watch.place`."""

    def __new__(cls, places: Iterable[int] = ()) -> "AbsentNumber":
        made = super().__new__(cls, "nan")
        made.places = frozenset(places)
        return made

    def _decide(self, *_: Any) -> NoReturn:
        refuse("asks for a value of a tensor that is on another stage")

    __lt__ = __le__ = __gt__ = __ge__ = _decide
    __eq__ = __ne__ = __bool__ = __int__ = __round__ = __trunc__ = _decide  # pyright: ignore
    __hash__ = float.__hash__

    def _with(self, *others: Any) -> "AbsentNumber":
        """What is computed of it and others."""
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        numbers = [other for other in others if isinstance(other, AbsentNumber)]
        return AbsentNumber(self.places.union(*(number.places for number in numbers)))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _with
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _with
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _with  # pyright: ignore


def absent(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = ""
) -> Absent:
    """Row by row."""
    return absent_like(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, name)


def absent_like(tensor: Tensor, device: torch.device | None = None, name: str = "") -> Absent:
    """device: by default that of `tensor`."""
    made = Absent(tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device)
    made.name = name
    return made


def absent_parameter(
    parameter: nn.Parameter, name: str, device: torch.device | None = None
) -> nn.Parameter:
    """That says it needs a gradient if `parameter` does. device: as for `absent_like`."""
    made = absent_like(parameter, device, name)
    stands = nn.Parameter(made, requires_grad=parameter.requires_grad)
    cast(Any, stands).name = name
    return stands


def refuse(what: str) -> NoReturn:
    """Raise NotHere with the user's line."""
    raise NotHere(f"{what} ({users_line()})")


def users_line() -> str:
    """The innermost line that is neither torch's nor ours: "my_job.py:41: if x.max() > 1"."""
    frame = sys._getframe(1)
    found = None
    while frame is not None:
        name = frame.f_code.co_filename
        is_ours = name.startswith(_OURS) and not name.startswith(_A_USERS)
        if not is_ours and not name.startswith("<"):
            found = frame
            break
        frame = frame.f_back
    if found is None:
        return "no line of yours"
    name, number = found.f_code.co_filename, found.f_lineno
    source = linecache.getline(name, number).strip()
    return f"{Path(name).name}:{number}" + (f": {source}" if source else "")


# --- who watches ------------------------------------------------------------------------------
class Watch:
    """Told of what is done with absent tensors."""

    @property
    def place(self) -> int:
        """The block that runs, or behind which code runs, where anybody counts them."""
        return 0

    def on_write(self, real: list[Tensor]) -> None:
        """An absent value is written into these, which are not. They will not be written."""
        refuse("writes a tensor that is on another stage into one that is not")

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        pass

    def on_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """The operation draws random numbers."""


_watch = Watch()


def watching() -> Watch:
    """Who watches now."""
    return _watch


def draw(func: Any, args: Any, kwargs: Any) -> None:
    """What the operation drew is drawn once more, if that counts."""
    _watch.on_draw(func, args, kwargs)


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """For the block's length; of this process, which runs one forward at a time."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """As rrelu in an evaluation, and attention without dropout."""
    known = schema_of(func).arguments
    given = {a.name: a.default_value for a in known if a.has_default_value()}
    given |= {**dict(zip((a.name for a in known), args, strict=False)), **kwargs}
    return given.get("training") is False or given.get("dropout_p") == 0


def is_draw_by_shape(func: Any) -> bool:
    """It draws as many random numbers for zeros as for any other values."""
    return _name_of(func).rstrip("_") in _DRAW_BY_SHAPE


def _name_of(func: Any) -> str:
    return schema_of(func).name.removeprefix("aten::")


def refuse_draw_by_values(func: Any, args: Any, kwargs: Any) -> None:
    """NotHere for an operation that may draw other random numbers for zeros than for the values."""
    if not is_draw_by_shape(func) and not _draws_nothing(func, args, kwargs):
        refuse(
            f"calls {_name_of(func)} on a tensor that is on another stage, and how many random "
            "numbers it draws may depend on the values"
        )


class Drawing(Watch):
    """What is drawn for tensors of other stages is drawn, and thrown away: what is drawn behind it
    is then what one rank with the whole model draws."""

    def on_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        refuse_draw_by_values(func, args, kwargs)
        if _draws_nothing(func, args, kwargs):
            return
        func(
            *tree_map_only(Absent, _zeros_like, args), **tree_map_only(Absent, _zeros_like, kwargs)
        )


def _zeros_like(tensor: Absent) -> Tensor:
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.zero_()


class EmptyIsAbsent(TorchFunctionMode):
    """While code of another stage's block runs: what it makes to write its results into is absent,
    as these are."""

    _FACTORIES = (torch.zeros, torch.empty, torch.ones, torch.full)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._FACTORIES and type(result) is Tensor:
            return absent_like(result)
        return result


class NumbersTaken(TorchFunctionMode):
    """Refuses to compute with a number that was asked for in another place: a stage that has one
    of them may not have the other, and the number would be nan there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(value, AbsentNumber) and value.places != frozenset({_watch.place}):
                refuse("asks for a value of a tensor that is on another stage")
        return func(*args, **(kwargs or {}))


# --- how an operation is done without values -----------------------------------------------------
_Described: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""
_known: dict[Any, Any] = {}


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation returns: absent where it returns a tensor."""
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else _device_of(args) or _device_of(kwargs)
    assert device is not None
    key: Any = (func, _described(args), _described(kwargs) if kwargs else None)
    try:
        found = _known.get(key)
    except TypeError:  # an argument that has no hash
        key = found = None
    if found is None:
        flat, spec = tree_flatten((args, kwargs))
        found = tree_map_only(Tensor, _Shape, _on_meta(func, flat, spec))
        if key is not None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = found
    if type(found) is _Shape:
        return found.made(device)
    return tree_map_only(_Shape, lambda shape: shape.made(device), found)


def _device_of(value: Any) -> torch.device | None:
    """Of the first absent tensor."""
    if type(value) is Absent:
        return value.device
    if isinstance(value, dict):
        value = cast(dict[str, Any], value).values()
    elif not isinstance(value, tuple | list):
        return None
    for each in cast(Iterable[Any], value):
        if (device := _device_of(each)) is not None:
            return device
    return None


def _on_meta(func: Any, flat: list[Any], spec: Any) -> Any:
    metas: list[Any] = []
    for value in flat:
        if isinstance(value, Tensor):
            strides = value.stride()
            value = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
        elif isinstance(value, torch.device):
            value = torch.device("meta")
        metas.append(value)
    args, kwargs = tree_unflatten(metas, spec)
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and not re.search(r"\bmeta\b", str(error)):
            raise  # the user's shapes do not fit
        name = str(func).removeprefix("aten.")
        raise NotHere(
            f"calls {name} on a tensor that is on another stage, the shape of whose result depends "
            f"on its values ({users_line()})"
        ) from error


class _Shape:
    """What is remembered of a result."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides = tuple(tensor.shape), tensor.stride()
        self.dtype = tensor.dtype

    def made(self, device: torch.device) -> Absent:
        return Absent(self.shape, self.strides, self.dtype, device)


def _described(value: Any) -> Any:
    """All of an argument that the shapes of an operation's results may depend on."""
    if isinstance(value, Absent):
        return value.described
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return (type(value), *map(_described, cast(Sequence[Any], value)))
    if isinstance(value, dict):
        named = cast(dict[str, Any], value)
        return tuple((name, _described(of_name)) for name, of_name in named.items())
    return (type(value), value)


@dataclass(frozen=True, slots=True)
class _Traits:
    """Of an operation."""

    writes: tuple[tuple[int, str], ...]
    """Arguments: positions and names."""
    statistics: tuple[int, ...]
    """Positions of those that it writes if it trains."""
    draws: bool
    """Random numbers."""
    is_in_place: bool
    """It returns what it writes."""

    @classmethod
    def of(cls, func: Any) -> "_Traits":
        schema = schema_of(func)
        statistics = _RUNNING_STATISTICS.get(func, ())
        writes = tuple(
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if i in statistics or (argument.alias_info is not None and argument.alias_info.is_write)
        )
        info = schema.returns[0].alias_info if len(schema.returns) == 1 else None
        draws = torch.Tag.nondeterministic_seeded in func.tags
        return cls(writes, statistics, draws, info is not None and info.is_write)

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that the operation writes."""
        if self.statistics and not args[5]:  # it does not train
            return []
        return tensors_in([args[i] if i < len(args) else kwargs.get(n) for i, n in self.writes])


_traits: dict[Any, _Traits] = {}


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operation writes."""
    return _Traits.of(func).written(args, kwargs)
