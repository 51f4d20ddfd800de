"""What is at a path, and in a folder: asked of this machine's disk, or of a store through pyarrow.

pyarrow is loaded by its caller: whoever only looks at a local folder needs neither it nor numpy.
"""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Kind(Enum):
    FILE = auto()
    FOLDER = auto()
    OTHER = auto()
    """A socket, a device and the like."""


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    kind: Kind
    size_bytes: int
    """0 of what is no file."""
    changed_at: float | None
    """Unix seconds of the last change, by the storage's clock; None where it does not say."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


# --- this machine's disk -----------------------------------------------------------
def local_entry(path: str) -> Entry | None:
    """None if nothing is there. Links are followed."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    if stat.S_ISREG(found.st_mode):
        return Entry(path, Kind.FILE, found.st_size, found.st_mtime)
    kind = Kind.FOLDER if stat.S_ISDIR(found.st_mode) else Kind.OTHER
    return Entry(path, kind, 0, found.st_mtime)


def local_entries(path: str, *, is_deep: bool = False) -> Iterator[Entry]:
    """In a folder; nothing if there is none. is_deep: in its folders, too. What goes meanwhile is
    left out."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        if (entry := local_entry(f"{path}/{name}")) is not None:
            yield entry
            if is_deep and entry.kind is Kind.FOLDER:
                yield from local_entries(entry.path, is_deep=True)


# --- through pyarrow ---------------------------------------------------------------
def stored_entry(filesystem: Any, path: str) -> Entry | None:
    """filesystem: of pyarrow. None if nothing is there."""
    return entry_of(filesystem.get_file_info(path))


def stored_entries(filesystem: Any, path: str, *, is_deep: bool = False) -> Iterator[Entry]:
    """As `local_entries`."""
    import pyarrow.fs  # pyright: ignore[reportMissingTypeStubs]

    arrow_fs: Any = pyarrow.fs  # has no type stubs
    selector = arrow_fs.FileSelector(path, allow_not_found=True, recursive=is_deep)
    for info in filesystem.get_file_info(selector):
        if (entry := entry_of(info)) is not None:
            yield entry


def entry_of(info: Any) -> Entry | None:
    """info: pyarrow's FileInfo."""
    match info.type.name:
        case "NotFound":
            return None
        case "File":
            kind = Kind.FILE
        case "Directory":
            kind = Kind.FOLDER
        case _:
            kind = Kind.OTHER
    changed_ns: int | None = info.mtime_ns
    changed_at = None if changed_ns is None else changed_ns / 1e9
    return Entry(info.path, kind, info.size or 0, changed_at)
