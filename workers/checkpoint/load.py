"""From a checkpoint to a replica, whoever wrote it and however many they were.

Every byte is verified before it is used, and nothing is unpickled. Writing is in saver.py.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.layout import Box, whole
from elastic.protocol.manifest import Manifest, StoredTensor
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.checkpoint_reading import PartReader, Range, blocks_of
from workers.tensors.local import as_bytes, part_of
from workers.train_state.digest import weights_sha256
from workers.train_state.state_header import weights_of
from workers.train_state.train_state import TrainState

READERS = 4
"""Threads that read: one alone does not use a disk's or an object store's bandwidth."""


def nothing() -> None:
    """Nobody asks how far a reader is."""


def load_newest(
    catalogue: Catalogue, train_state: TrainState, begin_piece: Callable[[], None] = nothing
) -> list[Damage]:
    """Restore the newest good checkpoint newer than `train_state` (or of step 0), else leave it
    alone.

    An initial state's memory is read into, so that damage found on the way leaves nothing of it; a
    later state is touched only when all was read and verified. Gives those that were found damaged.
    WrongInput if all are, and nothing else is left but to start over; OSError if a store is away.
    """
    damaged: list[Damage] = []
    held = train_state.step or -1  # an imported checkpoint, of step 0, replaces the initial state
    for step in reversed([s for s in catalogue.steps() if s > held]):
        try:
            manifest = catalogue.manifest(step)
            train_state.settle()
            into = None if train_state.step else train_state.tensors()
            tensors = read_tensors(catalogue, manifest, into=into, begin_piece=begin_piece)
        except DamagedCheckpoint as error:
            damaged.append(Damage(step, str(error)))
            continue
        train_state.restore(manifest.state, tensors)
        return damaged
    if damaged and train_state.step == 0:
        raise _all_damaged(catalogue, damaged)
    return damaged


def find_newest(
    catalogue: Catalogue, begin_piece: Callable[[], None] = nothing
) -> tuple[int | None, list[Damage]]:
    """The step of the newest good checkpoint, verified as a whole, and the damaged ones before it.

    Nothing is kept of it: the members of a sharded run each read their own boxes. WrongInput if
    all are damaged.
    """
    damaged: list[Damage] = []
    for step in reversed(catalogue.steps()):
        try:
            catalogue.manifest(step)
            for _ in catalogue.verify(step):
                begin_piece()
        except DamagedCheckpoint as error:
            damaged.append(Damage(step, str(error)))
            continue
        return step, damaged
    if damaged:
        raise _all_damaged(catalogue, damaged)
    return None, damaged


def _all_damaged(catalogue: Catalogue, damaged: list[Damage]) -> WrongInput:
    return WrongInput(
        f"all {len(damaged)} checkpoints in {catalogue.folder} are damaged, the newest: "
        f"{damaged[0].what}; move the folder away to start at step 0"
    )


def read_tensors(
    catalogue: Catalogue,
    manifest: Manifest,
    prefixes: tuple[str, ...] = ("",),
    into: Mapping[str, Tensor] | None = None,
    boxes: Mapping[str, Box] | None = None,
    begin_piece: Callable[[], None] = nothing,
) -> dict[str, Tensor]:
    """Name to tensor, on the host, of those whose names begin with one of `prefixes`.

    into: tensors to be filled and given back where dtype, shape and device are right; undefined if
    this raises. boxes: what is wanted of a tensor, all where it says nothing; found[name] has that
    only. begin_piece: called before each piece; what it raises ends the reading. Raises
    DamagedCheckpoint.
    """
    wanted = [t for t in manifest.tensors if t.name.startswith(prefixes)]
    boxes = {t.name: (boxes or {}).get(t.name, whole(t.shape)) for t in wanted}
    found = {t.name: _target(t, boxes[t.name], (into or {}).get(t.name)) for t in wanted}
    ranges: dict[str, list[Range]] = {}
    detours: list[tuple[Tensor, Tensor]] = []
    for stored in wanted:
        for chunk in stored.chunks:
            box = chunk.intersection(boxes[stored.name])
            if box is None:
                continue
            part = part_of(found[stored.name], box.relative_to(boxes[stored.name]))
            plain = part if part.is_contiguous() else torch.empty(part.shape, dtype=part.dtype)
            if plain is not part:
                detours.append((part, plain))
            left, item_bytes = as_bytes(plain), plain.itemsize
            for run in box.runs(chunk):
                size_bytes = len(run) * item_bytes
                into_run, left = left[:size_bytes], left[size_bytes:]
                offset = chunk.offset + run.start * item_bytes
                ranges.setdefault(chunk.file, []).append((offset, into_run))
    read_ranges(catalogue, manifest, ranges, begin_piece)
    for part, plain in detours:
        part.copy_(plain)
    return found


def _target(stored: StoredTensor, box: Box, given: Tensor | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    fits = (dtype, torch.Size(box.shape), torch.device("cpu"))
    if given is not None and (given.dtype, given.shape, given.device) == fits:
        return given
    return torch.empty(box.shape, dtype=dtype)


def read_ranges(
    catalogue: Catalogue,
    manifest: Manifest,
    wanted: dict[str, list[Range]],
    begin_piece: Callable[[], None] = nothing,
) -> None:
    """Fill memory from the checkpoint's files, by name; several blocks at a time.

    Raises DamagedCheckpoint.
    """
    folder = catalogue.of_step(manifest.step)
    with ExitStack() as stack, ThreadPoolExecutor(READERS) as pool:
        tasks: list[Future[int]] = []
        for file in manifest.files:
            if ranges := wanted.get(file.name):
                reader = stack.enter_context(PartReader(folder, file))
                for index, pieces in blocks_of(ranges):
                    tasks.append(pool.submit(reader.read_block, index, pieces))
        try:
            for task in tasks:
                begin_piece()
                task.result()
        finally:
            pool.shutdown(cancel_futures=True)  # before the readers are closed


def checkpoint_sha256(catalogue: Catalogue, step: int | None = None) -> str:
    """`weights_sha256` of what a checkpoint holds, the newest if no step is given.

    Raises DamagedCheckpoint; FileNotFoundError if there is none.
    """
    steps = catalogue.steps()
    if not steps:
        raise FileNotFoundError(f"there is no checkpoint in {catalogue.folder}")
    manifest = catalogue.manifest(steps[-1] if step is None else step)
    tensors = read_tensors(catalogue, manifest, ("model/",))
    weights = weights_of(manifest.state, tensors)
    return weights_sha256({name: tensors[stored] for name, stored in weights.items()})
