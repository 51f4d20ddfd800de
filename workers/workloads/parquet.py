"""`ParquetDigits` and `ParquetCharLM`: the shipped workloads on Parquet, read by the run's feed.

The files are made once per machine from what packages carry (scikit-learn's digits, the standard
library's sources), so there is nothing to download. Models and losses are digits.py's and
charlm.py's. No Ray here.
"""

import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic
from workers.workloads.charlm import CharLM
from workers.workloads.digits import VALIDATION_SAMPLES, Digits, digits
from workers.workloads.documents import character_ids, documents, scaled

DOCUMENTS_PER_GROUP, DIGITS_PER_GROUP = 13, 77
"""Odd on purpose: batches do not fit into row groups."""
SEPARATOR = 0  # the id of every character that is not listed


class ParquetDigits(Digits):
    """`Digits` from Parquet: images as lists of pixels; scaled in Ray tasks."""

    def __init__(self, *, folder: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def dataset(self) -> Any:
        images, labels = digits()
        place = Path(self.folder or shared_folder(f"digits-{version('scikit-learn')}"))
        pixels = (images[VALIDATION_SAMPLES:] * 16).to(torch.uint8).reshape(-1, 64).numpy()
        table = pa.table(
            {
                "image": pa.FixedSizeListArray.from_arrays(pixels.reshape(-1), 64),
                "label": labels[VALIDATION_SAMPLES:].numpy(),
            }
        )
        write_once(place, [("digits.parquet", table)], DIGITS_PER_GROUP)
        return elastic.data.parquet(place, transform=scaled, keeps_rows=True, window_bytes=16_384)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if isinstance(batch, dict):
            batch = [batch["image"].reshape(-1, 1, 8, 8), batch["label"]]
        return super().loss(model, batch)


class ParquetCharLM(CharLM):
    """`CharLM` on documents in Parquet, packed into rows of context + 1 characters."""

    def __init__(self, *, folder: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def dataset(self) -> Any:
        made_of = f"python-{platform.python_version()}-{self.limit_bytes}"
        place = Path(self.folder or shared_folder("charlm")) / made_of
        write_once(place, documents(self.limit_bytes), DOCUMENTS_PER_GROUP)
        packed = elastic.data.pack_tokens(
            length=self.context + 1, encode=character_ids, separator=SEPARATOR
        )
        return elastic.data.parquet(place, transform=packed, window_bytes=2**20)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch = [batch["tokens"][:, :-1], batch["tokens"][:, 1:]]
        characters, following = batch
        return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def shared_folder(name: str) -> Path:
    """Of this user on this machine: runs on several machines need `folder` on shared storage."""
    return Path(tempfile.gettempdir()) / f"elastic-data-{os.getuid()}" / name


def write_once(folder: Path, tables: Iterable[tuple[str, Any]], rows_per_group: int) -> None:
    """Write the tables as one whole folder, unless it exists; several processes may try."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    for name, table in tables:
        pq.write_table(table, temporary / name, row_group_size=rows_per_group)
    try:
        temporary.rename(folder)
    except OSError:  # another process was first
        remove(temporary, [name.name for name in temporary.iterdir()])


def remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).unlink()
    folder.rmdir()
