"""A replica's full state as named tensors and JSON: what newcomers and checkpoints receive.

No pickle: types that JSON and named tensors cannot carry are refused by name. Files and sockets
are not here.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.protocol.errors import WrongInput, in_words
from workers.tensors.local import is_shard, local
from workers.tensors.strides import is_dense, laid_out, plain_strides
from workers.torch_private.modules import is_persistent
from workers.train_state.digest import plain_name
from workers.train_state.state_header import MALFORMED, entry, names_in

Json = Any
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPING_OF = {name: kind for kind, name in _MAPPINGS.items()}
_SEQUENCE_OF = {name: kind for kind, name in _SEQUENCES.items()}


def capture(
    model: nn.Module, optimizer: Optimizer, scheduler: Any | None
) -> tuple[Json, dict[str, Tensor]]:
    """(a JSON value, name -> tensor): everything that `restore` needs to be equal bit for bit.

    Parameters, optimizer and scheduler are the live tensors, which the next optimizer step changes;
    what a forward may change is copied.
    """
    tensors = {f"model/{name}": t.detach() for name, t in model.named_parameters()}
    tensors |= {f"model/{name}": _clone(t) for name, t in model.named_buffers()}
    passing: dict[str, Tensor] = {}
    header = {
        "extra": {
            name: encode(module.get_extra_state(), f"extra/{name}", passing)
            for name, module in _with_extra_state(model)
        },
        "optimizer": _captured_optimizer(_names(model), optimizer, tensors),
        "scheduler": None
        if scheduler is None
        else encode(scheduler.state_dict(), "scheduler", tensors),
    }
    return header, tensors | {name: _clone(t) for name, t in passing.items()}


def restore(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any | None,
    header: Json,
    tensors: Mapping[str, Tensor],
    *,
    is_owned: bool = False,
) -> None:
    """Put a captured state into objects built by the same workload.

    is_owned: the caller gives `tensors` away, and the optimizer's become its state without a copy;
    else none is kept. WrongInput for a header that is not as `capture` gives it.
    """
    _restore_model(header, tensors, model)
    _restore_optimizer(
        entry(header, "optimizer", dict), tensors, _names(model), optimizer, is_owned
    )
    if (entry(header, "scheduler", object) is None) != (scheduler is None):
        raise ValueError("one of the state and the workload has a scheduler, the other has none")
    if scheduler is not None:
        state = decode(entry(header, "scheduler", object), tensors)
        try:
            scheduler.load_state_dict(state)
        except MALFORMED as error:
            raise WrongInput(f"the scheduler does not take the state: {in_words(error)}") from error


def trained_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The live parameters and optimizer state, by the names that `capture` gives them."""
    tensors = {f"model/{name}": t.detach() for name, t in model.named_parameters()}
    _captured_optimizer(_names(model), optimizer, tensors)
    return tensors


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """WrongInput if it keeps what `capture` refuses."""
    _captured_optimizer(_names(model), optimizer, {})


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, non-persistent ones too, each once under its first name."""
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


def parameters_named(name: str) -> list[str]:
    """What parameter a tensor of `capture` may be, or belong to, by its name."""
    kind, _, rest = name.partition("/")
    if kind == "model":
        return [rest]
    parts = rest.split("/") if kind == "optimizer" else []
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def weight_names(model: nn.Module) -> dict[str, str]:
    """Name in the state dict -> name in `capture`, for what counts as the model's weights."""
    stored = {id(t): f"model/{n}" for n, t in (*model.named_parameters(), *model.named_buffers())}
    state = cast(dict[str, object], model.state_dict(keep_vars=True))
    return {plain_name(n): stored[id(t)] for n, t in state.items() if isinstance(t, Tensor)}


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {p: name for name, p in model.named_parameters()}


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(n, m) for n, m in model.named_modules() if type(m).get_extra_state is not plain]


def _restore_model(header: Json, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    targets = {f"model/{name}": t for name, t in model_tensors(model).items()}
    given = {name for name in tensors if name.startswith("model/")}
    if given != set(targets):
        odd = sorted(given ^ set(targets))[:3]
        raise ValueError(f"the state is of another model: {odd} are only in one of the two")
    with torch.no_grad():
        for name, target in targets.items():
            source = tensors[name]
            if source.shape == target.shape and source.dtype == target.dtype:
                if local(source).data_ptr() != local(target).data_ptr():
                    local(target).copy_(local(source))
            elif not _is_cache(model, name.removeprefix("model/")):
                raise ValueError(
                    f"{name!r} is {source.dtype}{list(source.shape)} in the state and "
                    f"{target.dtype}{list(target.shape)} in the model"
                )
    for name, module in _with_extra_state(model):
        extra = entry(header, "extra", dict)
        module.set_extra_state(decode(entry(extra, name, object), tensors))


def _is_cache(model: nn.Module, name: str) -> bool:
    """A table that grows with its input, as long as it has been needed here."""
    path, _, key = name.rpartition(".")
    return not is_persistent(model.get_submodule(path), key)


def _captured_optimizer(
    names: dict[Tensor, str], optimizer: Optimizer, tensors: dict[str, Tensor]
) -> Json:
    groups: list[Json] = []
    for i, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if p not in names]
        if strangers:
            raise WrongInput(
                f"parameter group {i} of {type(optimizer).__name__} holds a tensor of shape "
                f"{list(strangers[0].shape)} that is no parameter of the model"
            )
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(
            {
                "params": [names[p] for p in group["params"]],
                "options": encode(options, f"groups/{i}", tensors, first_of(group)),
            }
        )
    state: dict[str, Json] = {}
    shared: dict[str, Json] = {}
    for key, value in cast(dict[object, object], optimizer.state).items():
        if isinstance(key, Tensor):
            state[names[key]] = encode(value, f"optimizer/{names[key]}", tensors, key)
        elif isinstance(key, str):
            shared[key] = encode(value, f"optimizer//{key}", tensors)
        else:
            raise WrongInput(f"optimizer state under a {type(key).__name__} cannot be carried")
    return {"groups": groups, "state": state, "shared": shared}


def first_of(group: Mapping[str, Any]) -> Tensor | None:
    """A parameter of the group: its tensor options are where it is, unless they are on the CPU."""
    return next(iter(group["params"]), None)


def _restore_optimizer(
    header: Json,
    tensors: Mapping[str, Tensor],
    names: dict[Tensor, str],
    optimizer: Optimizer,
    is_owned: bool,
) -> None:
    have = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    groups = entry(header, "groups", list)
    if have != [names_in(group, "params") for group in groups]:
        raise ValueError("build_optimizer made other parameter groups than those of the state")
    for group, captured in zip(optimizer.param_groups, groups, strict=True):
        options = decode(captured.get("options"), tensors, first_of(group))
        group.update(entry({"options": options}, "options", dict))
    optimizer.state.clear()
    parameters = {name: p for p, name in names.items()}
    for name, value in entry(header, "state", dict).items():
        p = entry(parameters, name, Tensor)
        optimizer.state[p] = decode(value, tensors, p, is_owned=is_owned)
    for key, value in entry(header, "shared", dict).items():
        cast(dict[Any, Any], optimizer.state)[key] = decode(value, tensors)


def encode(
    value: object, path: str, tensors: dict[str, Tensor], parameter: Tensor | None = None
) -> Json:
    """JSON for `value`; its tensors are put into `tensors` under names that begin with path.

    parameter: whose state it is. Strides are told where `decode` would not give them by itself.
    """

    def encoded(item: object, place: str) -> Json:
        return encode(item, f"{path}/{place}", tensors, parameter)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        number = cast(float, value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, Tensor):
        assert path not in tensors, path
        tensors[path] = value.detach()
        return {"tensor": path, "device": value.device.type, **_own_strides(value, parameter)}
    if isinstance(value, np.generic):
        return {"numpy": value.dtype.str, "value": encode(value.item(), path, tensors)}
    if kind is list:
        return [encoded(v, str(i)) for i, v in enumerate(cast(list[Any], value))]
    if kind in _SEQUENCES:
        items = list(cast(tuple[Any, ...], value))
        return {_SEQUENCES[kind]: encode(items, path, tensors, parameter)}
    if kind in _MAPPINGS:
        pairs = cast(dict[Any, Any], value).items()
        return {_MAPPINGS[kind]: [[encoded(k, "keys"), encoded(v, f"{k}")] for k, v in pairs]}
    raise WrongInput(
        f"state at {path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be carried "
        "to another process; keep numbers, strings, lists, dicts and tensors there"
    )


def decode(
    value: Json,
    tensors: Mapping[str, Tensor],
    parameter: Tensor | None = None,
    *,
    is_owned: bool = False,
) -> Any:
    """What `encode` was given, its tensors on the parameter's device unless they were on the CPU.

    They are copies, unless the caller owns `tensors` and gives them away. What has the parameter's
    shape gets its strides, which need not be those of the process that encoded it. WrongInput for
    what `encode` does not give.
    """
    try:
        return _decode(value, tensors, parameter, is_owned)
    except MALFORMED as error:
        raise WrongInput(f"the state holds a damaged value: {in_words(error)}") from error


def _decode(
    value: Json, tensors: Mapping[str, Tensor], parameter: Tensor | None, is_owned: bool
) -> Any:
    def decoded(item: Json) -> Any:
        return _decode(item, tensors, parameter, is_owned)

    if isinstance(value, list):
        return [decoded(v) for v in cast(list[Json], value)]
    if not isinstance(value, dict):
        return value
    (tag, content), *rest = cast(dict[str, Json], value).items()
    if tag == "float":
        return float(content)
    if tag == "tensor":
        about = dict(rest)
        host = torch.device("cpu")
        target = host if parameter is None or about["device"] == "cpu" else parameter.device
        tensor = tensors[content].to(target, copy=not is_owned)
        if is_shard(tensor) or not isinstance(tensor, Tensor):  # or it is still in its file
            return tensor
        strides = _own_dense(tensor.shape, about.get("strides"))
        return laid_out(tensor, strides or _usual_strides(tensor, parameter))
    if tag == "numpy":
        return np.dtype(content).type(decoded(rest[0][1]))
    if tag in _SEQUENCE_OF:
        make: Callable[[list[Any]], Any] = _SEQUENCE_OF[tag]
        return make(decoded(content))
    pairs = [(decoded(k), decoded(v)) for k, v in content]
    return cast(Callable[[Any], Any], _MAPPING_OF[tag])(dict(pairs))


def _own_strides(tensor: Tensor, parameter: Tensor | None) -> dict[str, list[int]]:
    is_usual = is_shard(tensor) or tensor.stride() == _usual_strides(tensor, parameter)
    return {} if is_usual or not is_dense(tensor) else {"strides": list(tensor.stride())}


def _own_dense(shape: torch.Size, strides: list[int] | None) -> list[int] | None:
    """Those that were told. ValueError if they are none of a tensor without gaps."""
    if strides is None:
        return None
    sizes = sorted((step, size) for step, size in zip(strides, shape, strict=True) if size != 1)
    dense = [1]
    for _, size in sizes:
        dense.append(dense[-1] * max(size, 1))
    is_whole = all(type(step) is int and 0 <= step < 2**63 for step in strides)
    if not is_whole or [step for step, _ in sizes] != dense[:-1]:
        raise ValueError(f"strides {strides} of a tensor of {list(shape)}")
    return strides


def _usual_strides(tensor: Tensor, parameter: Tensor | None) -> tuple[int, ...]:
    """Of a tensor of a state: its parameter's, if it is as large, else row by row."""
    if parameter is not None and tensor.shape == parameter.shape and not is_shard(parameter):
        return parameter.stride()
    return plain_strides(tensor.shape)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
