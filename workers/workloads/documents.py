"""Rows for the workloads on Parquet: files, and transforms that run in Ray tasks.

No torch here: a task that only prepares rows starts without it.
"""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

# Fixed, so that it depends neither on the Python version nor on how much text is read. Id 0 stands
# for every character that is not listed (one per byte of it).
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY_SIZE = len(CHARACTERS) + 1
VALIDATION_EVERY = 20  # each 20th file is validation text
FILES_PER_TABLE = 50
IDS = np.zeros(256, dtype=np.uint8)
IDS[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(1, VOCABULARY_SIZE)


def character_ids(text: bytes | str) -> np.ndarray:
    """uint8, one id per byte."""
    content = text.encode() if isinstance(text, str) else text
    return IDS[np.frombuffer(content, dtype=np.uint8)]


def documents(limit_bytes: int) -> Iterable[tuple[str, Any]]:
    """The standard library's training files, 50 to a table, and the name of its Parquet file."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts: list[str] = []
    size_bytes = 0
    for position, file in enumerate(found):
        if position % VALIDATION_EVERY and size_bytes < limit_bytes:
            texts.append(file.read_text(errors="replace"))
            size_bytes += len(texts[-1])
    for first in range(0, len(texts), FILES_PER_TABLE):
        part = texts[first : first + FILES_PER_TABLE]
        yield f"text-{first:04d}.parquet", pa.table({"text": part})


def scaled(table: Any) -> Any:
    """Images of 64 pixels: 0..16 to 0..1."""
    pixels = table.column("image").combine_chunks().flatten().to_numpy()
    flat = pa.array(pixels.astype(np.float32) / 16)
    return {
        "image": pa.FixedSizeListArray.from_arrays(flat, 64),
        "label": table.column("label").combine_chunks(),
    }
