"""`parquet(...)`: what a workload's `dataset()` returns to be fed from Parquet files.

Values only. What is in the files is found by footers.py, read by reading.py; who reads where and
when is elastic/on_ray/feed/actor.py's.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from elastic.data.packing import TokenPacking

MiB = 2**20
Transform: TypeAlias = Callable[[Any], Any]
"""pyarrow.Table to pyarrow.Table, or to a dict of column name to array."""
OnBadFile: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource:
    """Where the rows are and what becomes of them. Made by `parquet`, which explains the fields."""

    paths: tuple[str, ...]
    """URIs and local paths. A relative one is the same data wherever `folder` is."""
    columns: tuple[str, ...] | None
    transforms: tuple[Transform, ...]
    packing: TokenPacking | None
    keeps_rows: bool
    shuffle: bool
    window_bytes: int
    prefetch_bytes: int
    max_reads: int
    cpus_per_read: float
    on_bad_file: OnBadFile
    folder: str | None = None
    """What relative paths are relative to in this process: TARGET's folder. None: its own."""

    def at(self, folder: str) -> "ParquetSource":
        """The same data, read in a process where relative paths are relative to `folder`."""
        return replace(self, folder=folder)

    def within(self, folder: str) -> "ParquetSource":
        """As `at`; paths that lie in `folder` are relative, however they were written."""
        return replace(self, paths=tuple(below(folder, p) for p in self.paths), folder=folder)

    def place(self, path: str) -> str:
        """Where this process finds a path; a URI as it is."""
        return path if is_uri(path) else str(Path(self.folder or Path.cwd(), path))

    @property
    def row_length(self) -> int:
        """Elements of the stream that make one row: tokens where documents are packed, else 1."""
        return 1 if self.packing is None else self.packing.length

    @property
    def has_planned_counts(self) -> bool:
        """What a window gives is known from the footers, before it is read."""
        is_exact = not self.transforms or self.keeps_rows
        return is_exact and self.packing is None and self.on_bad_file == "raise"


def parquet(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    transform: Transform | TokenPacking | Sequence[Transform | TokenPacking] | None = None,
    keeps_rows: bool = False,
    shuffle: bool = True,
    window_bytes: int = 32 * MiB,
    prefetch_bytes: int = 256 * MiB,
    max_reads: int = 2,
    cpus_per_read: float = 0.0,
    on_bad_file: OnBadFile = "raise",
) -> ParquetSource:
    """Rows of Parquet files, each exactly once per epoch, read anywhere in the Ray cluster.

    path: a file, a directory (searched below, names starting with `.` or `_` left out), a list of
        either, as local paths or as URIs of `pyarrow.fs`. What lies in TARGET's folder goes to
        every node with it, and is the same data wherever that folder is; a relative path is
        relative to it. Other local paths must be seen by every node. Directory names like
        `year=2026` make no columns.
    columns: those to read; None for all.
    transform: one function or several, each from a pyarrow.Table to a pyarrow.Table (or a dict of
        column name to array, of any dims). It is called in a Ray task with the rows of one unit (a
        row group), so it may drop and multiply rows. It must give the same rows whenever it sees
        the same unit; torch, numpy and `random` are seeded by (seed, epoch, unit) before it.
        `pack_tokens(...)` may be the last.
    keeps_rows: a promise that `transform` gives one row per row (checked): the position of every
        row is then known without reading, and nothing has to be recorded to resume.
    shuffle: units in an order by (seed, epoch), rows permuted inside a window; False for the
        order of the files.
    window_bytes: consecutive units of this many bytes (uncompressed, at least one unit) are one
        window: read by one task and shuffled together.
    prefetch_bytes: what the windows that are read ahead may take of the object store, and never
        more than half of it. At least the window that is needed next is always read. Several
        windows must fit in, or nothing is read ahead.
    max_reads: windows that are read at the same time.
    cpus_per_read: CPUs that Ray sets aside for each; 0: they share the nodes' cores with trainers,
        and a cluster that is full of trainers is still fed.
    on_bad_file: "raise", or "skip": unreadable files and row groups are left out, counted and
        journaled.

    ValueError for settings that cannot work.
    """
    named = [path] if isinstance(path, str | os.PathLike) else list(path)
    transforms, packing = apart(chain_of(transform))
    if not named:
        raise ValueError("parquet([]): name at least one file or directory")
    if not 0 < window_bytes <= prefetch_bytes:
        raise ValueError(
            f"0 < window_bytes <= prefetch_bytes must hold, got {window_bytes} and {prefetch_bytes}"
        )
    if max_reads < 1 or cpus_per_read < 0:
        raise ValueError(
            f"max_reads must be at least 1 and cpus_per_read at least 0, got {max_reads} and "
            f"{cpus_per_read}"
        )
    if on_bad_file not in ("raise", "skip"):
        raise ValueError(f'on_bad_file must be "raise" or "skip", got {on_bad_file!r}')
    if isinstance(columns, str) or (columns is not None and not columns):
        raise ValueError(f"columns must be a list of names, got {columns!r}; None means all")
    return ParquetSource(
        paths=tuple(spelled(p) for p in named),
        columns=None if columns is None else tuple(columns),
        transforms=transforms,
        packing=packing,
        keeps_rows=keeps_rows,
        shuffle=shuffle,
        window_bytes=window_bytes,
        prefetch_bytes=prefetch_bytes,
        max_reads=max_reads,
        cpus_per_read=cpus_per_read,
        on_bad_file=on_bad_file,
    )


def apart(
    chain: tuple[Transform | TokenPacking, ...],
) -> tuple[tuple[Transform, ...], TokenPacking | None]:
    """The functions, and the packing that may follow them; ValueError for another order."""
    for each in chain:
        if not isinstance(each, TokenPacking) and not callable(each):
            raise ValueError(f"a transform is a function or pack_tokens(...), got {each!r}")
    packings = [t for t in chain if isinstance(t, TokenPacking)]
    if packings and (len(packings) > 1 or chain[-1] is not packings[0]):
        raise ValueError(
            "pack_tokens(...) must be the last transform, and the only one of its kind"
        )
    transforms = tuple(t for t in chain if not isinstance(t, TokenPacking))
    return transforms, packings[0] if packings else None


def chain_of(
    transform: Transform | TokenPacking | Sequence[Transform | TokenPacking] | None,
) -> tuple[Transform | TokenPacking, ...]:
    """The transforms in the order in which they are applied."""
    if transform is None:
        return ()
    if isinstance(transform, list | tuple):
        return tuple(cast("Sequence[Transform | TokenPacking]", transform))
    return (cast("Transform | TokenPacking", transform),)


def spelled(path: str | os.PathLike[str]) -> str:
    """A URI as it is; a relative path stays relative."""
    text = os.fspath(path)
    return text if is_uri(text) else str(Path(text).expanduser())


def is_uri(path: str) -> bool:
    return "://" in path


def below(folder: str, path: str) -> str:
    """A path that leads through `folder`, by whatever name, relative to it; any other as it is."""
    whole = Path(path)
    if is_uri(path) or not whole.is_absolute():
        return path
    for parent in (whole, *whole.parents):
        with suppress(OSError):  # one of the two is not there
            if os.path.samefile(parent, folder):
                return str(whole.relative_to(parent))
    return path
