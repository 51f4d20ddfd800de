"""Files of JSON lines that only grow: `journal.jsonl`, `metrics.jsonl`, `samples.jsonl`.

Where a filesystem cannot append, the local copy is the file and `upload` brings numbered segments
to storage; a segment's number is the offset of its first byte, so that none counts twice.
What the lines mean is in run_directory.py.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, encode

BLOCK_BYTES = 1 << 16
OFFSET_DIGITS = 15


class LineFile:
    """An append-only file of JSON lines. Opening it drops a torn last line."""

    def __init__(self, path: Path, remote: Folder | None = None) -> None:
        self.path = path
        self._remote = remote
        if remote is not None and not path.exists():
            path.write_bytes(joined(remote, path.name))
        path.touch()
        whole = whole_size(path)
        if whole < path.stat().st_size:
            os.truncate(path, whole)
        self._uploaded = self._base_size() if remote is not None else 0
        self._file = path.open("ab", buffering=0)
        self._pending = b""  # could not be written when it came: the disk was full

    def append(self, line: dict[str, Any]) -> None:
        """OSError if it cannot be written; it is not lost, and written before the next line."""
        self._pending += encode(line) + b"\n"
        self._write_pending()

    def _write_pending(self) -> None:
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def append_raw(self, content: bytes) -> None:
        """Whole lines that are encoded already, safe against the machine's crash."""
        self._pending += content
        self.sync()

    def sync(self) -> None:
        """What was appended survives the machine's crash."""
        self._write_pending()
        os.fsync(self._file.fileno())

    def truncate(self, size_bytes: int) -> None:
        """Drop everything after `size_bytes`, a line's end."""
        self._write_pending()
        self._file.truncate(size_bytes)
        os.fsync(self._file.fileno())
        if self._remote is not None:
            for name in segments(self._remote, self.path.name):
                if offset_of(name) >= size_bytes:
                    self._remote.delete(name)
            self.join()

    def upload(self) -> None:
        """Bring what is new to storage as one more segment; nothing to do for a local file."""
        if self._remote is None:
            return
        with self.path.open("rb") as file:
            file.seek(self._uploaded)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if new:
            self._remote.write(segment_name(self.path.name, self._uploaded), new)
            self._uploaded += len(new)

    def join(self) -> None:
        """Replace the segments in storage by one file."""
        if self._remote is None:
            return
        content = self.path.read_bytes()
        self._remote.write(self.path.name, content)
        for name in segments(self._remote, self.path.name):
            self._remote.delete(name)
        self._uploaded = len(content)

    def close(self) -> None:
        self.sync()
        self._file.close()
        self.join()

    def _base_size(self) -> int:
        """Bytes in storage; a rejoined file keeps new segments' offsets true."""
        self.join()
        return self.path.stat().st_size


def whole_size(path: Path) -> int:
    """Bytes up to the end of the last line that is whole and is JSON."""
    end = path.stat().st_size
    for start, line in lines_backwards(path):
        if line.endswith(b"\n") and is_json(line):
            return end
        end = start
    return 0


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def lines_backwards(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) from the file's end to its start, block by block."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        tail = b""  # content from `position` on, not yielded yet
        while position > 0:
            size = min(block_bytes, position)
            position -= size
            file.seek(position)
            tail = file.read(size) + tail
            while (cut := tail.rfind(b"\n", 0, len(tail) - 1)) >= 0:
                yield position + cut + 1, tail[cut + 1 :]
                tail = tail[: cut + 1]
        if tail:
            yield 0, tail


def parse_lines(content: bytes, name: str) -> list[dict[str, Any]]:
    """The lines as values; a torn last line is left out, damage elsewhere is WrongInput."""
    lines = content.split(b"\n")
    is_torn = bool(lines.pop())  # b"" after a whole last line
    values: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(cast("dict[str, Any]", json.loads(line)))
        except ValueError as error:
            if number == len(lines) and not is_torn:
                break
            raise WrongInput(f"{name} line {number} is damaged: {line[:60]!r}") from error
    return values


def read_lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    """All whole lines of a file, segments included; empty if there is no such file."""
    return parse_lines(joined(folder, name), f"{folder}/{name}")


# --- segments in storage that cannot append ---------------------------------------
def segment_name(name: str, offset: int) -> str:
    return f"{name}.{offset:0{OFFSET_DIGITS}d}"


def offset_of(segment: str) -> int:
    return int(segment.rpartition(".")[2])


def segments(folder: Folder, name: str) -> list[str]:
    """The names of a file's segments in ascending order."""
    found = (n for n in folder.names() if n.startswith(f"{name}."))
    return [n for n in found if n.removeprefix(f"{name}.").isdigit()]


def joined(folder: Folder, name: str) -> bytes:
    """The file's content: what was joined before, then the segments that follow it."""
    try:
        content = folder.read(name)
    except FileNotFoundError:
        content = b""
    if folder.local is not None:
        return content
    for segment in segments(folder, name):
        if offset_of(segment) == len(content):
            content += folder.read(segment)
    return content


class LineTail:
    """New whole lines of a file that somebody else appends to."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; all of them again after a roll back."""
        content = self._read()
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        return [value for line in content.splitlines() if (value := as_object(line)) is not None]

    def _read(self) -> bytes:
        if self._folder.local is None:
            content = joined(self._folder, self._name)
            self._offset = self._offset if self._offset <= len(content) else 0
            return content[self._offset :]
        path = self._folder.local / self._name
        if not path.exists():
            return b""
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            return file.read()


def as_object(line: bytes) -> dict[str, Any] | None:
    return cast("dict[str, Any]", json.loads(line)) if is_json(line) else None
