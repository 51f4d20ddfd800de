"""Checkpoints made without torch: a small state, saved by so many ranks, and read back."""

import functools

import numpy as np

from elastic.protocol.errors import DamagedCheckpoint
from elastic.protocol.layout import Box
from elastic.protocol.manifest import Manifest, Part
from elastic.store.catalogue import Catalogue, Damage, file_name
from elastic.store.checkpoint_files import SavedBox, write_part
from elastic.store.checkpoint_reading import PartReader

ROWS, COLUMNS = 700, 1000  # 2.8 MB of float32 per tensor


@functools.cache
def tensors(seed: int) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    return {
        "model/a": dice.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "model/b": dice.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "model/scalar": np.float32(seed).reshape(()),
        "model/empty": np.zeros((0, 3), np.float32),
        "optimizer/step": np.arange(5, dtype=np.int64),
    }


def part_of(
    values: dict[str, np.ndarray], rank: int, world_size: int
) -> list[tuple[SavedBox, np.ndarray]]:
    """Every rank's rows of every tensor; what has no rows is rank 0's."""
    found: list[tuple[SavedBox, np.ndarray]] = []
    for name, value in values.items():
        shape = value.shape
        low, high = 0, shape[0] if shape else 0
        if shape and shape[0]:
            low, high = shape[0] * rank // world_size, shape[0] * (rank + 1) // world_size
            if low == high:
                continue
        elif rank:
            continue
        piece = value[low:high] if shape else value
        start = (low, *(0 for _ in shape[1:])) if shape else ()
        found.append((SavedBox(name, str(value.dtype), shape, Box(start, piece.shape)), piece))
    return found


def save(
    catalogue: Catalogue,
    step: int,
    seed: int,
    world_size: int = 2,
    generation: int = 1,
    is_pinned: bool = False,
) -> Manifest:
    folder = catalogue.prepare(step)
    parts: list[Part] = []
    for rank in range(world_size):
        pieces = part_of(tensors(seed), rank, world_size)
        contents = (memoryview(np.ascontiguousarray(v)) for _, v in pieces)
        name = file_name(generation, rank, world_size)
        parts.append(write_part(folder, name, [b for b, _ in pieces], contents))
    return catalogue.publish(
        step, generation, parts, {"hello": [1]}, {"seed": seed, "is_pinned": is_pinned}
    )


def load(catalogue: Catalogue, step: int) -> dict[str, np.ndarray]:
    manifest, folder = catalogue.manifest(step), catalogue.of_step(step)
    files = {file.name: file for file in manifest.files}
    found: dict[str, np.ndarray] = {}
    for stored in manifest.tensors:
        value = np.zeros(stored.shape, stored.dtype)
        for chunk in stored.chunks:
            size = int(np.prod(chunk.shape)) * value.itemsize
            with PartReader(folder, files[chunk.file]) as reader:
                content = b"".join(bytes(piece) for piece in reader.read(chunk.offset, size))
            where = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True))
            value[where] = np.frombuffer(content, stored.dtype).reshape(chunk.shape)
        found[stored.name] = value
    return found


def assert_holds(catalogue: Catalogue, step: int, seed: int) -> None:
    found, expected = load(catalogue, step), tensors(seed)
    assert found.keys() == expected.keys()
    assert all(found[n].tobytes() == expected[n].tobytes() for n in expected)


def newest_good(catalogue: Catalogue) -> tuple[Manifest | None, list[Damage]]:
    """The newest checkpoint whose manifest is sound, and the newer ones that are not.

    Its files are verified as they are read; whoever finds one damaged takes the next.
    """
    damaged: list[Damage] = []
    for step in reversed(catalogue.steps()):
        try:
            return catalogue.manifest(step), damaged
        except DamagedCheckpoint as error:
            damaged.append(Damage(step, str(error)))
    return None, damaged
