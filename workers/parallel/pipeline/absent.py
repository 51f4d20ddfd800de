"""Tensors that are somewhere else: shape, dtype and device, and no memory.

A stage runs the user's code for the whole model. Parameters of other stages are absent, and so is
whatever is computed from them; where the user's code cannot do without a value, it is told, with
its line. Which parameters are absent is chain.py's and stage.py's business.
"""

import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.parallel.pipeline.trees import tensors_in, tree_flatten, tree_map_only, tree_unflatten

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

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Absent":
        make = cast(Any, Tensor)._make_wrapper_subclass
        return make(cls, tuple(shape), strides=tuple(strides), dtype=dtype, device=device)

    __torch_function__ = cast(Any, torch)._C._disabled_torch_function_impl

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
        return AbsentNumber()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            refuse("asks for a value of a tensor that is on another stage")
        written = _written(func, args, kwargs)
        real = [t for t in written if not isinstance(t, Absent)]
        if real:
            _watch.on_write(real)
        if torch.Tag.nondeterministic_seeded in func.tags:
            _watch.on_draw(func, args, kwargs)
        result = _results(func, args, kwargs)
        _watch.on_operation(func, args, kwargs, result)
        if not written:
            return result
        return written[0] if isinstance(result, Tensor) and _is_in_place(func) else result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an absent tensor has no values to be saved")


class AbsentNumber(float):
    """A value that is not here, as a number: it can be printed and logged, and prints as nan. No
    decision can be made of it."""

    def __new__(cls) -> "AbsentNumber":
        return super().__new__(cls, "nan")

    def _decide(self, *_: Any) -> NoReturn:
        refuse("asks for a value of a tensor that is on another stage")

    __lt__ = __le__ = __gt__ = __ge__ = _decide
    __eq__ = __ne__ = __bool__ = __int__ = __round__ = __trunc__ = _decide  # pyright: ignore
    __hash__ = float.__hash__

    def _same(self, *_: Any) -> "AbsentNumber":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _same  # pyright: ignore


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

    def on_write(self, real: list[Tensor]) -> None:
        """An absent value is written into these, which are not. They will not be written."""
        refuse("writes a tensor that is on another stage into one that is not")

    def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        pass

    def on_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """The operation draws random numbers."""


_watch = Watch()


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
    known = func._schema.arguments
    given = {a.name: a.default_value for a in known if a.has_default_value()}
    given |= {**dict(zip((a.name for a in known), args, strict=False)), **kwargs}
    return given.get("training") is False or given.get("dropout_p") == 0


def refuse_draw_by_values(func: Any, args: Any, kwargs: Any) -> None:
    """NotHere for an operation that may draw other random numbers for zeros than for the values."""
    name = func._schema.name.removeprefix("aten::")
    if name.rstrip("_") not in _DRAW_BY_SHAPE and not _draws_nothing(func, args, kwargs):
        refuse(
            f"calls {name} on a tensor that is on another stage, and how many random numbers it "
            "draws may depend on the values"
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


# --- how an operation is done without values -----------------------------------------------------
_known: dict[Any, Any] = {}


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation returns: absent where it returns a tensor."""
    flat, spec = tree_flatten((args, kwargs))
    device = next(t.device for t in flat if isinstance(t, Absent))
    key: Any = (func, spec, *map(_described, flat))
    try:
        found = _known.get(key)
    except TypeError:  # an argument that has no hash
        key = found = None
    if found is None:
        found = tree_map_only(Tensor, _Shape, _on_meta(func, flat, spec))
        if key is not None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = found
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else device
    return tree_map_only(_Shape, lambda shape: shape.made(device), found)


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
        if not isinstance(error, NotImplementedError) and " meta tensor" not in str(error):
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
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return (type(value), value)


_writes: dict[Any, tuple[tuple[int, str], ...]] = {}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operation writes."""
    places = _writes.get(func)
    if places is None:
        arguments = func._schema.arguments
        places = _writes[func] = tuple(
            (i, argument.name)
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    statistics = _RUNNING_STATISTICS.get(func, ())
    if not places and not statistics:
        return []
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
    if statistics and args[5]:  # it trains
        found += [args[i] for i in statistics]
    return tensors_in(found)


def _is_in_place(func: Any) -> bool:
    returns = func._schema.returns
    info = returns[0].alias_info if len(returns) == 1 else None
    return info is not None and info.is_write
