"""Weights and optimizer state that others wrote: torch DCP, `torch.save`, safetensors.

Nothing of unknown origin is executed, except by `read_dcp`, whose caller says that it may be. What
becomes of it is importing.py's.
"""

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line
from workers.train_state.digest import plain_name

EXTRA_STATE = "_extra_state"
MODEL_KEYS = ("model", "state_dict", "model_state_dict")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
DDP_PREFIX = "module."


@dataclass(frozen=True)
class OptimizerState:
    """By the names of the parameters, or by their positions in the groups."""

    by_name: dict[str, Any] | None
    by_position: dict[int, Any]
    group_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Foreign:
    """What a source holds."""

    place: str
    weights: dict[str, Callable[[], Tensor]]
    """Name in the state dict, without what wrappers add -> reads it, on the host."""
    extra: dict[str, Any]
    """What is no tensor in the state dict."""
    optimizer: OptimizerState | None


def foreign(
    place: str, state: Mapping[str, Any], optimizer: OptimizerState | None = None
) -> Foreign:
    """state: the state dict; its tensors, or functions that read them."""
    is_ddp = bool(state) and all(name.startswith(DDP_PREFIX) for name in state)
    names = {n: plain_name(n.removeprefix(DDP_PREFIX) if is_ddp else n) for n in state}
    weights: dict[str, Callable[[], Tensor]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            weights[names[name]] = lambda value=value: value
        elif callable(value):
            weights[names[name]] = cast(Callable[[], Tensor], value)
    extra = {names[n]: v for n, v in state.items() if names[n] not in weights}
    return Foreign(place, weights, extra, optimizer)


# --- torch.save --------------------------------------------------------------------------------
def read_torch(path: Path) -> Foreign:
    """A state dict, or a dict that has one under a usual name. Only what `weights_only` allows."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            check_archive(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except FileNotFoundError as error:
        raise WrongInput(f"there is no file {path}") from error
    except WrongInput:
        raise
    except Exception as error:  # its unpickler and its file format have many
        raise WrongInput(
            f"{path} cannot be read with torch.load(weights_only=True): {first_line(error)}"
        ) from error
    if not isinstance(content, dict):
        raise WrongInput(f"{path} holds a {type(content).__name__}, not a state dict")
    return from_tree(str(path), cast(dict[str, Any], content))


def check_archive(path: Path) -> None:
    """WrongInput if a member is not what its checksum says: torch reads them without."""
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise WrongInput(
                f"{path} is damaged: the checksum of {damaged!r} in it does not match (or torch "
                "wrote it after set_crc32_options(False): load and save it again)"
            )


def from_tree(place: str, found: dict[str, Any]) -> Foreign:
    """A state dict, or one under a usual name with an optimizer beside it."""
    models = [found[key] for key in MODEL_KEYS if isinstance(found.get(key), dict)]
    optimizers = [found[key] for key in OPTIMIZER_KEYS if isinstance(found.get(key), dict)]
    state = optimizer_state(optimizers[0]) if optimizers else None
    bare = {name: value for name, value in found.items() if name not in OPTIMIZER_KEYS}
    return foreign(place, models[0] if models else bare, state)


def optimizer_state(value: dict[str, Any]) -> OptimizerState | None:
    """From `Optimizer.state_dict()` or `get_optimizer_state_dict()`; None from anything else."""
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        return None
    sizes = tuple(len(group["params"]) for group in groups)
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return OptimizerState({plain_name(str(n)): v for n, v in state.items()}, {}, sizes)
    order = [str(key) for group in groups for key in group["params"]]
    known = {str(key): v for key, v in state.items()}  # DCP's keys are strings
    return OptimizerState(None, {i: known[k] for i, k in enumerate(order) if k in known}, sizes)


# --- safetensors -------------------------------------------------------------------------------
def read_safetensors(path: Path) -> Foreign:
    """A file, or a folder with `model.safetensors` or an index and its shards."""
    if not path.is_dir():
        return foreign(str(path), _tensors_of(path))
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if (path / "model.safetensors").is_file():
        return foreign(str(path), _tensors_of(path / "model.safetensors"))
    if len(indexes) != 1:
        raise WrongInput(
            f"{path} has neither model.safetensors nor one *.safetensors.index.json; name the file"
        )
    try:
        where: dict[str, str] = json.loads(indexes[0].read_text())["weight_map"]
        files = {file: _tensors_of(path / Path(file).name) for file in sorted(set(where.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongInput(f"{indexes[0]} is no index: {first_line(error)}") from error
    absent = [f"{name!r} in {file}" for name, file in where.items() if name not in files[file]]
    if absent:
        raise WrongInput(
            f"{indexes[0]} names {len(absent)} absent tensors: {', '.join(absent[:3])}"
        )
    return foreign(str(path), {name: files[file][name] for name, file in where.items()})


def _tensors_of(path: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        file: Any = safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise WrongInput(f"{path} cannot be read: {first_line(error)}") from error
    names: list[str] = list(file.keys())
    return {name: lambda name=name: file.get_tensor(name) for name in names}


# --- torch.distributed.checkpoint ----------------------------------------------------------------
def read_dcp(path: Path) -> Foreign:
    """Through torch's own reader, which unpickles: for sources that one trusts only.

    The state dict is under `model`, or at the top; optimizer state under `optimizer`.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
        paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
        content: dict[str, Any] = {
            key: torch.empty(d.size, dtype=d.properties.dtype)
            if isinstance(d, TensorStorageMetadata)
            else None
            for key, d in metadata.state_dict_metadata.items()
            if len(paths.get(key, "1")) == 1 or paths[key][0] in ("model", "optimizer")
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs in one process
            dcp_load(content, storage_reader=FileSystemReader(path), no_dist=True)
    except Exception as error:  # its metadata is a pickle: anything can come
        raise WrongInput(f"{path} cannot be read as DCP: {first_line(error)}") from error
    tree: dict[Any, Any] = {}
    for key, value in content.items():
        *outer, last = paths.get(key, (key,))
        inner = tree
        for step in outer:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return from_tree(str(path), cast(dict[str, Any], with_lists(tree)))


def with_lists(value: Any) -> Any:
    """DCP flattens lists, too: into the positions of their items."""
    if not isinstance(value, dict):
        return value
    found = {k: with_lists(v) for k, v in cast(dict[Any, Any], value).items()}
    if found and list(found) == list(range(len(found))):
        return list(found.values())
    return found
