"""Folders in durable storage: a local directory or any `pyarrow.fs` URI, written atomically.

What the files mean is elsewhere (journal.py, run_directory.py).
"""

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any, cast

from elastic.protocol.errors import WrongInput, text_of
from elastic.store.entries import (
    Entry,
    Kind,
    local_entries,
    local_entry,
    stored_entries,
    stored_entry,
)
from elastic.store.remote import copy_file, from_uri, is_refused, read_whole, shown_uri


@dataclass(frozen=True)
class Folder:
    """One folder. Writes publish whole files: a reader sees the old or the new content.

    A local folder's files are read and written without pyarrow: a command that a person gives, and
    a run that begins, would wait longer for that than for all else.
    """

    store: Any
    """A pyarrow FileSystem (its stubs are partial, hence Any); None: this machine's disk."""
    path: str

    @property
    def local(self) -> Path | None:
        """The directory where files can be appended to, else None (object stores)."""
        return Path(self.path) if self.store is None else None

    @property
    def filesystem(self) -> Any:
        """pyarrow's, of whichever store it is."""
        return local_filesystem() if self.store is None else self.store

    def at(self, name: str) -> "Folder":
        return Folder(self.store, self.path_of(name))

    @property
    def parent(self) -> "Folder":
        return Folder(self.store, self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def create(self) -> None:
        if self.local:
            self.local.mkdir(parents=True, exist_ok=True)
            return
        self.filesystem.create_dir(self.path, recursive=True)

    def names(self) -> list[str]:
        """Names of the files directly in this folder, sorted; empty if there is no folder."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of each file directly in this folder; empty if there is no folder."""
        return {e.name: e.size_bytes for e in self._entries() if e.kind is Kind.FILE}

    def modified_times(self) -> dict[str, float]:
        """Unix seconds of the last change of each file directly in this folder, by the storage's
        clock; 0 where it does not say."""
        return {e.name: e.changed_at or 0.0 for e in self._entries() if e.kind is Kind.FILE}

    def folders(self) -> list[str]:
        """Names of the folders directly in this one, sorted; empty if there is no folder."""
        return sorted(e.name for e in self._entries() if e.kind is Kind.FOLDER)

    def all_files(self) -> Iterator[tuple[str, int, float]]:
        """Path below this folder, bytes and Unix seconds of the last change of every file in it, at
        any depth. What goes while it is listed is left out."""
        start = len(self.path) + 1 if self.path else 0
        for entry in self._entries(is_deep=True):
            if entry.kind is Kind.FILE:
                yield entry.path[start:], entry.size_bytes, entry.changed_at or 0.0

    @property
    def is_there(self) -> bool:
        """In an object store: something in it is."""
        found = self._entry(self.path)
        return found is not None and found.kind is Kind.FOLDER

    def exists(self, name: str) -> bool:
        return self._entry(self.path_of(name)) is not None

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is no such file."""
        found = self._entry(self.path_of(name))
        return None if found is None else found.size_bytes

    def modified(self, name: str) -> float | None:
        """Unix seconds of the file's last change, None if there is no such file."""
        found = self._entry(self.path_of(name))
        return None if found is None else found.changed_at

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        if self.local:
            return (self.local / name).read_bytes()
        return read_whole(self.filesystem, self.path_of(name))

    def read_from(self, name: str, offset: int) -> bytes:
        """What a file that only grows has from `offset` on; FileNotFoundError if there is none."""
        if self.local:
            with (self.local / name).open("rb") as file:
                file.seek(offset)
                return file.read()
        with self.open(name) as file:
            return file.read_at(max(0, file.size() - offset), offset)

    def write(self, name: str, content: bytes, *, is_durable: bool = True) -> None:
        """Publish `content` under `name`; `is_durable` also survives the machine's crash."""
        if self.local:
            write_local(self.local / name, content, is_durable=is_durable)
            return
        with self.filesystem.open_output_stream(self.path_of(name)) as stream:
            stream.write(content)

    def open(self, name: str) -> Any:
        """The file for reads at any position: pyarrow's NativeFile (`size`, `read_at`, `close`)."""
        return self.filesystem.open_input_file(self.path_of(name))

    def delete_all(self) -> None:
        """Delete this folder and everything in it; no error if there is none."""
        if self._entry(self.path) is not None:
            self.filesystem.delete_dir(self.path)

    def move_folder(self, name: str, new_name: str, *, last: str) -> None:
        """Rename a folder of files in this one; file by file in an object store, which knows no
        folders: `last` is the first file to go and the last to arrive."""
        old, new = self.at(name), self.at(new_name)
        if self.local:
            self.filesystem.move(old.path, new.path)
            return
        new.create()
        sizes = old.sizes()
        names = sorted(sorted(sizes), key=lambda each: each == last)
        for each in names:
            copy_file(self.filesystem, old.path_of(each), sizes[each], new.path_of(each))
        for each in reversed(names):
            old.delete(each)
        old.delete_all()

    def delete(self, name: str) -> None:
        if not self.exists(name):
            return
        if self.local:
            (self.local / name).unlink()
        else:
            self.filesystem.delete_file(self.path_of(name))

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def _entry(self, path: str) -> Entry | None:
        return local_entry(path) if self.store is None else stored_entry(self.store, path)

    def _entries(self, *, is_deep: bool = False) -> Iterator[Entry]:
        if self.store is None:
            return local_entries(self.path, is_deep=is_deep)
        return stored_entries(self.store, self.path, is_deep=is_deep)

    def __str__(self) -> str:
        return self.path


def open_folder(place: str) -> Folder:
    """The folder at a local path or URI; it need not exist yet. WrongInput if it cannot be used."""
    try:
        return reach_folder(place)
    except OSError as error:
        raise _unusable(place, error) from error


def reach_folder(place: str) -> Folder:
    """As `open_folder`, for a run at work, which can wait: OSError if the store is away."""
    if "://" not in place:
        return Folder(None, str(Path(place).expanduser().absolute()))
    try:
        filesystem, path = from_uri(place)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not is_refused(error):
            raise
        raise _unusable(place, error) from error
    return Folder(None if filesystem.type_name == "local" else filesystem, path.rstrip("/"))


def local_filesystem() -> Any:
    """pyarrow's, of this machine's disk."""
    import pyarrow.fs  # pyright: ignore[reportMissingTypeStubs]

    arrow_fs: Any = pyarrow.fs  # has no type stubs
    return arrow_fs.LocalFileSystem()


def _unusable(place: str, error: BaseException) -> WrongInput:
    return WrongInput(f"storage {shown_uri(place)!r} cannot be used: {_why(error, place)}")


def place_of(storage: str, name: str) -> str:
    """How a person names the folder `name` in `storage`: a path, or a URI with the same query. No
    store is asked."""
    if "://" not in storage or storage.startswith("file://"):
        return str(open_folder(storage).at(name))
    path, mark, query = storage.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def write_local(path: Path, content: bytes, *, is_durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_directory(path.parent)


def open_own(path: Path, mode: str) -> IO[Any]:
    """A file of a run, to write to. WrongInput if it is a symbolic link: whoever may write to the
    folder must not choose what else this process writes to."""
    try:
        return open(path, mode, buffering=0 if "b" in mode else -1, opener=_open_unlinked)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        what = "is a symbolic link, through which no run writes; move it away"
        raise WrongInput(f"{path} {what}") from error


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive the machine's crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- JSON without NaN and infinities ---------------------------------------------
def encode(value: object) -> bytes:
    """One line of JSON, without the newline; numbers that are not finite become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return text.encode()


def finite(value: object) -> object:
    """`value` with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("list[object]", value)]
    return value


def read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    """The JSON object in a file, None if there is no such file. WrongInput if it is damaged or may
    not be read, OSError if the store does not answer, which says nothing about the file."""
    try:
        content = folder.read(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not isinstance(error, IsADirectoryError | NotADirectoryError) and not is_refused(error):
            raise
        raise WrongInput(f"{folder}/{name} cannot be read: {first_line(error)}") from error
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise WrongInput(f"{folder}/{name} is damaged: it is no JSON object; move it away")
    return cast("dict[str, Any]", value)


Kinds = Mapping[str, type | UnionType]
"""Field -> what it must be."""


def check_kinds(found: Mapping[str, Any], kinds: Kinds, place: str) -> None:
    """WrongInput if a field is not there or is of another kind. Whole numbers are numbers, too."""
    for name, kind in kinds.items():
        value = found.get(name)
        is_bare = name not in found or (isinstance(value, bool) and kind is not bool)
        if is_bare or not (isinstance(value, kind) or (kind is float and isinstance(value, int))):
            raise WrongInput(f"{place} is damaged: it has no sound {name!r}")


def write_json(folder: Folder, name: str, value: object, *, is_durable: bool = True) -> None:
    folder.write(name, encode(value) + b"\n", is_durable=is_durable)


def first_line(error: BaseException) -> str:
    return (text_of(error).strip() or type(error).__name__).splitlines()[0]


def first_line_of_yaml(error: BaseException) -> str:
    """What PyYAML says of a text, with the line where it is; as `first_line` for other errors."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return first_line(error)
    return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'no YAML'}"


def _why(error: BaseException, place: str) -> str:
    """What it says, which may repeat the URI."""
    return first_line(error).replace(place, shown_uri(place))


# --- is a folder the same folder on another node? ----------------------------------
PROBE = ".probe-"
"""Begins the name of a file that is there only to see whether it can be."""


@dataclass(frozen=True)
class Probe:
    """A small file left in storage; a node that finds the token there sees the same storage."""

    place: str
    name: str
    token: str


def leave_probe(place: str) -> Probe:
    """Create the storage folder if need be and leave a probe in it. WrongInput if that fails."""
    folder = open_folder(place)
    token = secrets.token_hex(16)
    probe = Probe(folder.path if folder.local else place, f"{PROBE}{token[:8]}", token)
    try:
        folder.create()
        folder.write(probe.name, token.encode(), is_durable=False)
    except OSError as error:
        raise WrongInput(
            f"storage {shown_uri(place)!r} cannot be written: {_why(error, place)}; "
            "choose another folder or change its permissions"
        ) from error
    return probe


def refuse_unwritable(place: str) -> None:
    """WrongInput if this machine may not write to an object store; one that is away is another
    matter. OSError if it does not answer at all."""
    folder = reach_folder(place)
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        folder.write(name, b"probe", is_durable=False)
    except OSError as error:
        if is_refused(error):
            raise WrongInput(
                f"storage {shown_uri(place)!r} cannot be written: {_why(error, place)}; "
                "choose another one, or give this machine the right to write there"
            ) from error
    else:
        with suppress(OSError):  # who may write but not delete can serve a run
            folder.delete(name)


def missing_folders(place: str) -> list[Path]:
    """Local folders that would have to be made for this one, the innermost first. WrongInput if
    none can be made: it is below a file."""
    local, missing = open_folder(place).local, list[Path]()
    while local is not None and not os.path.isdir(local):
        if os.path.lexists(local):
            what = "is a file" if os.path.isfile(local) else "is no folder"
            raise WrongInput(
                f"storage {place!r} cannot be written: {local} {what}; choose another folder"
            )
        missing.append(local)
        local = local.parent
    return missing


def remove_empty(folders: list[Path]) -> None:
    """What was made for a run that came to nothing. Whoever has put something there keeps it."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def sees_probe(probe: Probe) -> bool:
    """Asked on another node. OSError if the storage does not answer there."""
    try:
        return reach_folder(probe.place).read(probe.name) == probe.token.encode()
    except (FileNotFoundError, NotADirectoryError, PermissionError, WrongInput):
        return False


def remove_probe(probe: Probe) -> None:
    """One that cannot be removed does no harm, least of all to a run that has ended."""
    with suppress(OSError):
        open_folder(probe.place).delete(probe.name)
