"""From a checkpoint to a replica, whoever wrote it and however many they were.

Every byte is verified before it is used, and nothing is unpickled. Writing is in saver.py.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import Manifest, StoredTensor
from elastic.store.catalogue import Catalogue, Damage
from elastic.store.checkpoint_files import PartReader
from workers.digest import weights_sha256
from workers.peer import as_bytes
from workers.replica import Replica


def load_newest(catalogue: Catalogue, replica: Replica) -> list[Damage]:
    """Restore the newest good checkpoint that is newer than `replica`, else leave it as it is.

    Gives those that were found damaged on the way. WrongInput if all are, and nothing else is left
    but to start over.
    """
    damaged: list[Damage] = []
    for step in reversed([s for s in catalogue.steps() if s > replica.step]):
        try:
            manifest = catalogue.manifest(step)
            tensors = read_tensors(catalogue, manifest)
        except DamagedCheckpoint as error:
            damaged.append(Damage(step, str(error)))
            continue
        replica.restore(manifest.state, tensors)
        return damaged
    if damaged and replica.step == 0:
        raise WrongInput(
            f"all {len(damaged)} checkpoints in {catalogue.folder} are damaged, the newest: "
            f"{damaged[0].what}; move the folder away to start at step 0"
        )
    return damaged


def read_tensors(
    catalogue: Catalogue, manifest: Manifest, prefixes: tuple[str, ...] = ("",)
) -> dict[str, Tensor]:
    """Name to tensor, on the host, of those whose names begin with one of `prefixes`.

    Raises DamagedCheckpoint.
    """
    folder = catalogue.of_step(manifest.step)
    files = {file.name: file for file in manifest.files}
    wanted = [t for t in manifest.tensors if t.name.startswith(prefixes)]
    found = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in wanted}
    with ExitStack() as stack:
        readers: dict[str, PartReader] = {}
        for stored in wanted:
            for chunk in stored.chunks:
                if chunk.file not in readers:
                    reader = PartReader(folder, files[chunk.file])
                    readers[chunk.file] = stack.enter_context(reader)
                target = box_of(found[stored.name], stored, chunk.start, chunk.shape)
                size = math.prod(chunk.shape) * target.element_size()
                if size:
                    fill(target, readers[chunk.file].read(chunk.offset, size))
    return found


def checkpoint_sha256(catalogue: Catalogue, step: int | None = None) -> str:
    """`weights_sha256` of what a checkpoint holds, the newest if no step is given.

    Raises DamagedCheckpoint; FileNotFoundError if there is none.
    """
    steps = catalogue.steps()
    if not steps:
        raise FileNotFoundError(f"there is no checkpoint in {catalogue.folder}")
    manifest = catalogue.manifest(steps[-1] if step is None else step)
    tensors = read_tensors(catalogue, manifest, ("model/",))
    return weights_sha256({n: tensors[stored] for n, stored in manifest.state["weights"].items()})


def box_of(
    tensor: Tensor, stored: StoredTensor, start: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        if size != stored.shape[dim]:
            tensor = tensor.narrow(dim, at, size)
    return tensor


def fill(target: Tensor, pieces: Iterable[memoryview]) -> None:
    """Copy bytes in C order into `target`, whatever its strides."""
    plain = target if target.is_contiguous() else torch.empty_like(target).contiguous()
    into, at = as_bytes(plain), 0
    for piece in pieces:
        into[at : at + piece.nbytes] = piece
        at += piece.nbytes
    if plain is not target:
        target.copy_(plain)
