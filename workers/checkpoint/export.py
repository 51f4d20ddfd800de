"""A checkpoint in the formats of others: torch DCP, `torch.save`, Hugging Face safetensors.

Reading is stream.py's, publishing elastic/store/exports.py's, the way back
importing.py's. DCP and safetensors hold one large tensor in memory at a time, `torch.save`
wants all of them.
"""

import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from elastic.protocol.layout import whole
from elastic.store.checkpoint_files import SavedBox, write_part
from elastic.store.files import open_folder, sync_directory, write_local
from workers.checkpoint.stream import CheckpointReader, Reference, filled, size_bytes
from workers.tensors.local import as_bytes

Notes = list[str]
"""What an export leaves out, a line each."""
DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


# --- torch.distributed.checkpoint --------------------------------------------------------
def export_dcp(reader: CheckpointReader, folder: Path) -> Notes:
    """{"model", "optimizer", "step"} for `dcp.load`; the optimizer in the form, keyed by names,
    of `get_optimizer_state_dict`. A file per tensor: torch keeps a file's tensors in memory."""
    notes = [
        f"optimizer state {name!r} belongs to no parameter, which DCP has no place for"
        for name in reader.optimizer_shared()
    ]
    optimizer, groups = reader.optimizer_state(), reader.optimizer_groups()
    bare = [n for group in groups for n in group["params"] if n not in optimizer]
    if optimizer and bare:
        notes.append(
            f"{len(bare)} parameters never had a gradient and have no optimizer state, the first "
            f"is {bare[0]!r}; load with DefaultLoadPlanner(allow_partial_load=True)"
        )
    state = {
        "model": reader.model(),
        "optimizer": {"state": optimizer, "param_groups": groups},
        "step": reader.manifest.step,
    }
    planner = _StreamingPlanner(reader)
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs in one process
        try:
            whole = filled(state, planner.stand_in)
            dcp_save(whole, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's wrapping, by rank
            raise error.failures[0][0] from error
    sync_directory(folder)
    return notes


class _StreamingPlanner(DefaultSavePlanner):
    """Plans with empty stand-ins, and reads each tensor when it is to be written."""

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__()
        self._reader = reader
        self._stored: dict[int, str] = {}
        self._stand_ins: list[Tensor] = []

    def stand_in(self, reference: Reference) -> Tensor:
        made = torch.empty(reference.shape, dtype=reference.dtype, device="meta")
        self._stand_ins.append(made)  # keeps its id from being given again
        self._stored[id(made)] = reference.stored
        return made

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        stored = self._stored.get(id(found))
        return found if stored is None else self._reader.read(stored)


# --- torch.save -----------------------------------------------------------------------------
def export_torch(reader: CheckpointReader, path: Path) -> Notes:
    """{"model", "optimizer", "step", "scheduler"} for `torch.load(path, weights_only=True)`; the
    optimizer as `Optimizer.state_dict()` gives it. Tied weights share their storage, as usual."""
    read: dict[str, Tensor] = {}

    def tensor_of(reference: Reference) -> Tensor:
        if reference.stored not in read:
            read[reference.stored] = reader.read(reference.stored)
        return read[reference.stored]

    notes: Notes = []
    content: dict[str, Any] = {
        "model": _plain(reader.model(), notes),
        "optimizer": _indexed_optimizer(reader),
        "step": reader.manifest.step,
    }
    if (scheduler := reader.scheduler()) is not None:
        content |= _plain({"scheduler": scheduler}, notes)
    with path.open("wb") as file:
        torch.save(filled(content, tensor_of), file)
        file.flush()
        os.fsync(file.fileno())
    return notes


def _plain(values: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Without the items that `torch.load(weights_only=True)` would refuse."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        content = io.BytesIO()
        torch.save(filled(value, lambda _: None), content)
        content.seek(0)
        try:
            torch.load(content, weights_only=True)
        except Exception as error:  # whatever its unpickler raises
            reason = str(error).strip().splitlines()[0]
            notes.append(f"{name!r} is left out, weights_only=True refuses it: {reason}")
            continue
        found[name] = value
    return found


def _indexed_optimizer(reader: CheckpointReader) -> dict[str, Any]:
    groups = reader.optimizer_groups()
    names = [name for group in groups for name in group["params"]]
    index_of = {name: i for i, name in enumerate(names)}
    state = {index_of[name]: value for name, value in reader.optimizer_state().items()}
    return {
        "state": state | reader.optimizer_shared(),
        "param_groups": [{**g, "params": [index_of[n] for n in g["params"]]} for g in groups],
    }


# --- safetensors as Hugging Face has it --------------------------------------------------------
def export_safetensors(
    reader: CheckpointReader, folder: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Notes:
    """The weights: `model.safetensors`, or shards of at most `max_shard_bytes` (a larger tensor
    has its own) and their index. Of tied weights one name is kept, as the format's users expect;
    the metadata maps the others to it."""
    kept, tied = untied(reader.weights)
    notes = [f"{name!r} is left out: it is tied to {kept_as!r}" for name, kept_as in tied.items()]
    if reader.has_extra_state:
        notes.append("the modules' extra state is left out: it is no tensor")
    shards = list(_shards(reader, kept, max_shard_bytes))
    total = len(shards)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
        metadata = {name: kept_as for name, kept_as in tied.items() if kept_as in names}
        _write_shard(reader, folder, file, {n: kept[n] for n in names}, metadata)
        weight_map |= dict.fromkeys(names, file)
    if total > 1:
        size = sum(size_bytes(reader.tensors[stored]) for stored in kept.values())
        about = {"total_size": size} | ({"tied_weights": tied} if tied else {})
        index = {"metadata": about, "weight_map": dict(sorted(weight_map.items()))}
        content = json.dumps(index, indent=2).encode() + b"\n"
        write_local(folder / INDEX, content, is_durable=True)
    return notes


def untied(weights: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(name -> stored tensor, each once; left out name -> the name that is kept)."""
    kept: dict[str, str] = {}
    for name, stored in weights.items():
        known = kept.setdefault(stored, name)
        if stored == f"model/{name}" != f"model/{known}":
            kept[stored] = name  # the one that named_parameters() says
    names = {name: stored for stored, name in kept.items()}
    return names, {n: kept[stored] for n, stored in weights.items() if n not in names}


def _shards(reader: CheckpointReader, kept: dict[str, str], most: int) -> Iterator[list[str]]:
    shard, used = list[str](), 0
    for name, stored in kept.items():
        size = size_bytes(reader.tensors[stored])
        if shard and used + size > most:
            yield shard
            shard, used = [], 0
        shard.append(name)
        used += size
    yield shard


def _write_shard(
    reader: CheckpointReader,
    folder: Path,
    file: str,
    names: dict[str, str],
    metadata: dict[str, str],
) -> None:
    """Larger elements first, so that all are aligned."""
    order = sorted(names, key=lambda n: -reader.reference(names[n]).dtype.itemsize)
    boxes: list[SavedBox] = []
    for name in order:
        stored = reader.tensors[names[name]]
        boxes.append(SavedBox(name, stored.dtype, stored.shape, whole(stored.shape)))
    tensors = (reader.read(names[name]) for name in order)
    contents = (as_bytes(t) if t.numel() else memoryview(b"") for t in tensors)
    write_part(open_folder(str(folder)), file, boxes, contents, metadata)
