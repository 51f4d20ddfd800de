"""A checkpoint of step 0 from weights that others wrote: a run that is started on it begins there.

The workload builds the model, so that names, shapes and dtypes are checked before anything is
written. Reading the sources is foreign_weights.py's.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from elastic.protocol.errors import WrongInput
from elastic.protocol.layout import Position
from elastic.protocol.mesh import DDP, Mesh, Parallel
from elastic.store.catalogue import PINNED, Catalogue, file_name
from elastic.store.checkpoint_files import SavedBox, write_part
from workers.checkpoint.foreign_weights import EXTRA_STATE, Foreign, OptimizerState
from workers.checkpoint.saver import share
from workers.checkpoint.stream import OnBytes, ignore
from workers.tensors.local import as_bytes
from workers.train_state.digest import plain_name, tensor_bytes
from workers.train_state.train_state import TrainState
from workers.train_state.trial import step_undone

SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class ImportSettings:
    """For building the replica: its initial values are kept where the source has none."""

    seed: int
    clip_norm: None = None
    max_nonfinite: int = 1
    parallel: Parallel = DDP
    reduction: str = "fast"
    precision: str = "fp32"
    activation_checkpointing: bool = False
    offload: bool = False


def load_foreign(
    train_state: TrainState,
    source: Foreign,
    on_bytes: OnBytes = ignore,
    *,
    is_partial: bool,
    with_optimizer: bool,
) -> list[str]:
    """Put the source's weights, and its optimizer state if it has any, into a new replica.

    is_partial: names that only one of the two has are no error. Gives what is to be told, a line
    each. Options of the optimizer (learning rate, ...) stay the workload's.
    """
    notes: list[str] = []
    if with_optimizer and source.optimizer is not None:
        notes += _load_optimizer(train_state, source, source.optimizer, is_partial)
    return _load_weights(train_state.model, source, is_partial, on_bytes) + notes


def publish_initial(
    catalogue: Catalogue,
    train_state: TrainState,
    about: Mapping[str, Any],
    on_bytes: OnBytes = ignore,
) -> None:
    """As the checkpoint of step 0, pinned. Raises OSError; nothing is left then."""
    boxes: list[SavedBox] = []

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pieces = share(tensors, Position(Mesh(DDP, 1), 0))
        boxes.extend(box for box, _ in pieces)
        return {box.name: piece for box, piece in pieces}

    snapshot = train_state.snapshot(whole)

    def contents() -> Iterator[memoryview]:
        for box in boxes:
            copied = snapshot.take(box.name)
            yield as_bytes(copied) if copied.numel() else memoryview(b"")
            on_bytes(copied.nbytes)

    try:
        part = write_part(catalogue.prepare(0), file_name(0, 0, 1), boxes, contents())
        catalogue.publish(0, 0, [part], snapshot.header, {**about, PINNED: True})
    finally:
        catalogue.discard(0, 0)  # nothing of a published one


# --- weights -----------------------------------------------------------------------------------
def _load_weights(
    model: nn.Module, source: Foreign, is_partial: bool, on_bytes: OnBytes
) -> list[str]:
    state = cast(dict[str, object], model.state_dict(keep_vars=True))
    targets = {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}
    tied: dict[int, list[str]] = {}
    for name, t in targets.items():
        tied.setdefault(id(t), []).append(name)
    groups = [[n for n in names if n in source.weights] for names in tied.values()]
    missing = [names[0] for names, given in zip(tied.values(), groups, strict=True) if not given]
    misfits: list[str] = []
    if is_partial:  # a head for another number of classes has the same names
        fits = lambda n: source.weights[n]().shape == targets[n].shape  # noqa: E731
        misfits = [names[0] for names in groups if names and not all(map(fits, names))]
        groups = [names for names in groups if names and names[0] not in misfits]
    notes = _compare_names(source, missing, [n for n in source.weights if n not in targets])
    if misfits:
        notes.append(f"of another shape, left at initial values: {', '.join(misfits[:SHOWN])}")
    if notes and (not is_partial or not any(groups)):
        hint = "; --partial keeps initial values instead" if any(groups) else ""
        raise WrongInput(f"{source.place} does not fit the model: {'; '.join(notes)}{hint}")
    num_converted = 0
    for given in filter(None, groups):
        num_converted += _fill(targets[given[0]], given[0], source)
        on_bytes(targets[given[0]].nbytes)
        for other in given[1:]:
            one, two = (source.weights[n]() for n in (given[0], other))
            if tensor_bytes(one) != tensor_bytes(two):
                raise WrongInput(f"{given[0]!r} and {other!r} are tied here and differ in source")
    if num_converted:
        notes.append(f"{num_converted} tensors were converted to wider numbers, without loss")
    return notes + _load_extra(model, source)


def _compare_names(source: Foreign, missing: list[str], unexpected: list[str]) -> list[str]:
    found: list[str] = []
    for what, names in (
        ("it lacks", missing),
        ("the model lacks", unexpected),
    ):
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            found.append(f"{what} {len(names)}: {', '.join(names[:SHOWN])}{more}")
    return found


def _fill(target: Tensor, name: str, source: Foreign) -> bool:
    """Whether the dtype had to be converted; never with loss."""
    given = source.weights[name]()
    if given.shape != target.shape:
        raise WrongInput(
            f"{name!r} is {list(given.shape)} in {source.place} and {list(target.shape)} here"
        )
    if given.dtype != target.dtype and not is_wider(target.dtype, given.dtype):
        raise WrongInput(
            f"{name!r} is {given.dtype} in {source.place} and {target.dtype} here, which would "
            "lose digits; convert one of the two"
        )
    with torch.no_grad():
        target.copy_(given)
    return given.dtype != target.dtype


def is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Every number of `other` is one of `dtype`."""
    both = dtype.is_floating_point and other.is_floating_point
    return both and torch.promote_types(dtype, other) == dtype


def _load_extra(model: nn.Module, source: Foreign) -> list[str]:
    plain = nn.Module.get_extra_state
    notes: list[str] = []
    for path, module in model.named_modules():
        if type(module).get_extra_state is not plain:
            name = f"{path}." * bool(path) + EXTRA_STATE
            if name in source.extra:
                module.set_extra_state(source.extra[name])
            else:
                notes.append(f"{name!r} is not in the source and keeps its initial value")
    return notes


# --- optimizer -----------------------------------------------------------------------------------
def _load_optimizer(
    train_state: TrainState, source: Foreign, given: OptimizerState, is_partial: bool
) -> list[str]:
    optimizer = train_state.optimizer
    names = {p: n for n, p in train_state.model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    by_name = _by_name(source, given, groups)
    kind = type(optimizer).__name__
    expected = _try_step(train_state, names)
    parameters = {name: p for p, name in names.items()}
    for name, state in by_name.items():
        if name not in expected:
            if is_partial:
                continue
            raise _unfit(source, f"it is of {name!r}, which is not in the optimizer here")
        optimizer.state[parameters[name]] = _fitted(source, name, state, expected[name], kind)
    return [f"optimizer state of {len(optimizer.state)} parameters"]


def _by_name(source: Foreign, given: OptimizerState, groups: list[list[str]]) -> dict[str, Any]:
    if given.by_name is not None:
        return given.by_name
    sizes = tuple(map(len, groups))
    if sizes != given.group_sizes:
        raise _unfit(source, f"its groups have {given.group_sizes} parameters, here {sizes}")
    order = [name for group in groups for name in group]
    return {order[i]: state for i, state in given.by_position.items()}


def _try_step(train_state: TrainState, names: dict[nn.Parameter, str]) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps for each parameter, from a step that is undone."""
    optimizer = train_state.optimizer
    options = [
        copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]
    for p in train_state.parameters.values():
        p.grad = torch.zeros_like(p)
    step_undone(optimizer, list(train_state.parameters.values()))
    train_state.drop_gradients()
    kept = {
        names[cast(nn.Parameter, p)]: dict(state)
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor)
    }
    optimizer.state.clear()
    for group, option in zip(optimizer.param_groups, options, strict=True):
        parameters = group["params"]
        group.clear()
        group.update({"params": parameters, **option})
    return kept


def _fitted(
    source: Foreign, name: str, state: dict[str, Any], expected: dict[str, Any], kind: str
) -> dict[str, Any]:
    if state.keys() != expected.keys():
        have, want = (", ".join(sorted(s)) or "nothing" for s in (state, expected))
        raise _unfit(source, f"for {name!r} it has {have}; {kind} keeps {want}")
    found: dict[str, Any] = {}
    for key, like in expected.items():
        value = state[key]
        if isinstance(like, Tensor) and isinstance(value, int | float):
            value = torch.tensor(value, dtype=like.dtype)
        if isinstance(like, Tensor) and isinstance(value, Tensor):
            is_same = value.dtype == like.dtype or is_wider(like.dtype, value.dtype)
            if value.shape != like.shape or not is_same:
                what = f"{value.dtype}{list(value.shape)}, here {like.dtype}{list(like.shape)}"
                raise _unfit(source, f"{key!r} of {name!r} is {what}")
            value = torch.empty_like(like).copy_(value)
        found[key] = value
    return found


def _unfit(source: Foreign, why: str) -> WrongInput:
    return WrongInput(
        f"the optimizer state in {source.place} does not fit: {why}; --weights-only starts afresh"
    )
