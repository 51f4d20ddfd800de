"""Files of JSON lines that only grow: `journal.jsonl`, `metrics.jsonl`, `samples.jsonl`.

Where a filesystem cannot append, the local copy is the file and `upload` brings numbered segments
to storage; a segment's number is the offset of its first byte, so that none counts twice. Old ones
are merged (tiers.py). What the lines mean is in run_directory.py.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, Kinds, check_kinds, encode, open_own
from elastic.store.tiers import Span, Tiers

BLOCK_BYTES = 1 << 16
REMOTE_BLOCK_BYTES = 1 << 20
"""One request each."""
JOINS = 100
"""So often may a file be joined while it is read."""
OFFSET_DIGITS = 15
IDLE_LOOKS = 3
"""After so many looks without news a tail looks whether its place is inside of a segment by now."""


class LineFile:
    """An append-only file of JSON lines. Opening it drops a torn last line."""

    def __init__(self, path: Path, remote: Folder | None = None, *, is_new: bool = False) -> None:
        """is_new: storage has nothing of it, and need not be asked."""
        self.path = path
        self._remote = remote
        self._tiers = Tiers()
        if remote is not None and not is_new and not path.exists():
            path.write_bytes(joined(remote, path.name))
        self._file = open_own(path, "ab")
        whole = whole_size(path)
        if whole < path.stat().st_size:
            os.truncate(path, whole)
        self._is_cut = False
        """Storage has lines that `truncate_here` has dropped."""
        self._uploaded = self._base_size() if remote is not None and not is_new else 0
        self._pending = b""  # could not be written when it came: the disk was full

    def append(self, line: dict[str, Any]) -> None:
        """OSError if it cannot be written; it is not lost, and written before the next line."""
        self.keep(encode(line) + b"\n")
        self.write()

    def keep(self, content: bytes) -> None:
        """Whole lines that are encoded already, for the next `write`."""
        self._pending += content

    def write(self) -> None:
        """What is kept; OSError leaves the rest of it kept."""
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]

    def sync(self) -> None:
        """What was appended survives the machine's crash."""
        self.write()
        os.fsync(self._file.fileno())

    def truncate(self, size_bytes: int) -> None:
        """Drop everything after `size_bytes`, a line's end."""
        self.truncate_here(size_bytes)
        self.cut()

    def truncate_here(self, size_bytes: int) -> None:
        """Storage elsewhere drops it with the next `cut` or `upload`."""
        self.write()
        self._file.truncate(size_bytes)
        os.fsync(self._file.fileno())
        if self._remote is not None and size_bytes < self._uploaded:
            self._uploaded, self._is_cut = size_bytes, True

    def cut(self) -> None:
        """From the end, so that what a crash in between leaves are the first of the old lines."""
        if self._remote is None or not self._is_cut:
            return
        for name in reversed(segments(self._remote, self.path.name)):
            if offset_of(name) >= self._uploaded:
                self._remote.delete(name)
        self._publish(self.path.read_bytes()[: self._uploaded])
        self._is_cut = False

    def upload(self) -> None:
        """Bring what is new to storage as one more segment; nothing to do for a local file."""
        if self._remote is None:
            return
        self.cut()
        with self.path.open("rb") as file:
            file.seek(self._uploaded)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if not new:
            return
        self._remote.write(segment_name(self.path.name, self._uploaded), new)
        start, self._uploaded = self._uploaded, self._uploaded + len(new)
        self._tiers.add(start, self._uploaded)
        for group in self._tiers.due():
            self._merge(self._remote, group)

    def _merge(self, remote: Folder, group: list[Span]) -> None:
        """What a crash leaves of the old segments begins where none ends: nobody reads it."""
        start, end = group[0][0], group[-1][1]
        with self.path.open("rb") as file:
            file.seek(start)
            remote.write(segment_name(self.path.name, start), file.read(end - start))
        for each, _ in group[1:]:
            remote.delete(segment_name(self.path.name, each))

    def join(self) -> None:
        """Replace the segments in storage by one file."""
        self.cut()
        self._publish(self.path.read_bytes())

    def _publish(self, content: bytes) -> None:
        """One file in storage, which no segment follows."""
        if self._remote is None:
            return
        self._remote.write(self.path.name, content)
        for name in segments(self._remote, self.path.name):
            self._remote.delete(name)
        self._uploaded = len(content)
        self._tiers.clear()

    def close(self) -> None:
        self.sync()
        self._file.close()
        self.join()

    def abandon(self) -> None:
        """Close it; what storage does not have yet is given up."""
        self._file.close()

    def _base_size(self) -> int:
        """Bytes in storage; a rejoined file keeps new segments' offsets true."""
        self.join()
        return self.path.stat().st_size


def whole_size(path: Path) -> int:
    """Bytes up to the end of the last line that is whole and is a JSON object."""
    end = path.stat().st_size
    for start, line in lines_backwards(path):
        if line.endswith(b"\n") and as_object(line) is not None:
            return end
        end = start
    return 0


def lines_backwards(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) from the file's end to its start, block by block."""
    with path.open("rb") as file:
        yield from _backwards(file, file.seek(0, os.SEEK_END), block_bytes)


def _backwards(file: Any, position: int, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """file: opened by Python or pyarrow. position: one after the last byte that is read."""
    rest: list[bytes] = []  # of the line that ends at or after `position`, its end first
    while position > 0:
        size = min(block_bytes, position)
        position -= size
        file.seek(position)
        block: bytes = file.read(size)
        end = len(block)
        own_end = end if rest else end - 1  # a line's own newline is its last byte
        while (cut := block.rfind(b"\n", 0, own_end)) >= 0:
            yield position + cut + 1, block[cut + 1 : end] + b"".join(reversed(rest))
            rest, end, own_end = [], cut + 1, cut
        rest.append(block[:end])
    if rest:
        yield 0, b"".join(reversed(rest))


def read_backwards(folder: Folder, name: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a file from its newest on; those that are no objects are left out. Reads
    little more than the lines that are taken."""
    if folder.local is None:
        lines = _remote_backwards(folder, name)
    elif (path := folder.local / name).exists():
        lines = (line for _, line in lines_backwards(path))
    else:
        return
    for line in lines:
        if (value := as_object(line)) is not None:
            yield value


def _remote_backwards(folder: Folder, name: str) -> Iterator[bytes]:
    """Segment by segment: each holds whole lines."""
    end: int | None = None
    for _ in range(JOINS):
        for segment in reversed(chain(folder.sizes(), name)):
            start = offset_of(segment)
            if end is not None and start >= end:
                continue
            try:
                content = folder.read(segment)
            except FileNotFoundError:
                break  # the file has it by now, or an earlier segment
            content = content if end is None else content[: end - start]
            end = start
            yield from reversed(content.splitlines())
        else:
            break
    if end == 0:
        return
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return
    with file:
        last = file.size() if end is None else min(end, file.size())
        yield from (line for _, line in _backwards(file, last, REMOTE_BLOCK_BYTES))


def parse_lines(content: bytes, name: str) -> list[dict[str, Any]]:
    """The lines as values; a torn last line is left out, damage elsewhere is WrongInput."""
    lines = content.split(b"\n")
    is_torn = bool(lines.pop())  # b"" after a whole last line
    values: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        value = as_object(line)
        if value is not None:
            values.append(value)
        elif number < len(lines) or is_torn:
            raise WrongInput(f"{name} line {number} is damaged: {line[:60]!r}")
    return values


def read_records(folder: Folder, name: str, kinds: Kinds) -> list[dict[str, Any]]:
    """As `read_lines`, of lines that all have these fields; WrongInput names one that has not."""
    lines = read_lines(folder, name)
    for number, line in enumerate(lines, start=1):
        check_kinds(line, kinds, f"{folder}/{name} line {number}")
    return lines


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
    return numbered(folder.names(), name)


def numbered(names: Iterable[str], name: str) -> list[str]:
    """Those of `names` that are segments of a file, in the same order."""
    found = (n for n in names if n.startswith(f"{name}."))
    return [n for n in found if n.removeprefix(f"{name}.").isdigit()]


def chain(sizes: Mapping[str, int], name: str) -> list[str]:
    """The segments that go on where the joined file ends, each where the one before it ends."""
    end, found = sizes.get(name, 0), list[str]()
    for segment in sorted(numbered(sizes, name)):
        if offset_of(segment) == end:
            found.append(segment)
            end += sizes[segment]
    return found


def joined(folder: Folder, name: str) -> bytes:
    """The file's content: what was joined before, then the segments that follow it."""
    for _ in range(JOINS):
        names = [] if folder.local is not None else segments(folder, name)
        try:
            return b"".join(_pieces(folder, name, names))
        except FileNotFoundError:  # a segment was joined between the listing and its turn
            continue
    raise OSError(f"{folder}/{name} was joined {JOINS} times while it was read")


def _pieces(folder: Folder, name: str, names: list[str]) -> Iterator[bytes]:
    """names: of the segments, listed before the file is read, which may take them in meanwhile."""
    try:
        content = folder.read(name)
    except FileNotFoundError:
        content = b""
    yield content
    end = len(content)
    for segment in names:
        if offset_of(segment) == end:
            content = folder.read(segment)
            end += len(content)
            yield content


def appended(folder: Folder, name: str, offset: int) -> bytes:
    """What a file has from `offset` on, its segments included. Reads little more than that."""
    if folder.local is not None:
        return folder.read_from(name, offset)
    content, sizes = b"", folder.sizes()
    try:
        if sizes[name] > offset:
            content = folder.read_from(name, offset)
        for segment in chain(sizes, name):
            end = offset + len(content)
            if (start := offset_of(segment)) + sizes[segment] > end:
                content += folder.read(segment)[end - start :]
    except FileNotFoundError:  # joined meanwhile: the rest is in the file, at the next look
        pass
    return content


def grown(sizes: Mapping[str, int], name: str) -> int:
    """Bytes of a file, its segments included."""
    return sizes[name] + sum(sizes[segment] for segment in chain(sizes, name))


class LineTail:
    """New whole lines of a file that somebody else appends to. A look reads only what is new."""

    def __init__(self, folder: Folder, name: str, *, last_bytes: int | None = None) -> None:
        """last_bytes: begin about so far before the end; None: at the beginning."""
        self._folder, self._name, self._last_bytes = folder, name, last_bytes
        self._offset: int | None = None
        """Of the first byte that was not given yet; None before the first look."""
        self._joined_bytes = 0
        self._num_idle = 0

    def poll(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; after a roll back as at the first call."""
        content = self._new_local() if self._folder.local else self._new_remote()
        content = content[: content.rfind(b"\n") + 1]
        self._offset = (self._offset or 0) + len(content)
        return [value for line in content.splitlines() if (value := as_object(line)) is not None]

    def _new_local(self) -> bytes:
        size_bytes = self._folder.size(self._name) or 0
        if self._offset is None or size_bytes < self._offset:
            self._offset = self._begin(size_bytes)
        return self._folder.read_from(self._name, self._offset) if size_bytes else b""

    def _new_remote(self) -> bytes:
        """A segment is named by its offset, so that the next one is found without a listing."""
        joined_bytes = self._folder.size(self._name) or 0
        was_cut = joined_bytes != self._joined_bytes and joined_bytes < (self._offset or 0)
        self._joined_bytes = joined_bytes
        if self._offset is None or was_cut:
            self._offset = self._begin_remote()
        content = b""
        if joined_bytes > self._offset:
            content = self._folder.read_from(self._name, self._offset)
        while (segment := self._next_segment(self._offset + len(content))) is not None:
            try:
                found = self._folder.read(segment)
            except FileNotFoundError:  # merged since then
                return content
            content += found[self._offset + len(content) - offset_of(segment) :]
        self._num_idle = 0 if content else self._num_idle + 1
        return content

    def _next_segment(self, offset: int) -> str | None:
        """That begins there, or has been merged into one that begins earlier."""
        segment = segment_name(self._name, offset)
        if self._folder.size(segment) is not None:
            return segment
        if self._num_idle < IDLE_LOOKS:
            return None
        self._num_idle = 0
        sizes = self._folder.sizes()
        found = (s for s in chain(sizes, self._name) if offset_of(s) < offset)
        return next((s for s in found if offset < offset_of(s) + sizes[s]), None)

    def _begin(self, size_bytes: int) -> int:
        """Not always a line's beginning: what is left of that line is no JSON object."""
        return 0 if self._last_bytes is None else max(0, size_bytes - self._last_bytes)

    def _begin_remote(self) -> int:
        if self._last_bytes is None:
            return 0
        sizes = self._folder.sizes()
        joined_bytes = sizes.get(self._name, 0)
        offsets = [offset_of(segment) for segment in chain(sizes, self._name)]
        if not offsets:
            return self._begin(joined_bytes)
        start = self._begin(offsets[-1] + sizes[segment_name(self._name, offsets[-1])])
        if start < joined_bytes:
            return start
        return next((o for o in offsets if o >= start), offsets[-1])


def as_object(line: bytes) -> dict[str, Any] | None:
    """None if it is not one, as what a crash or a cut has left of a line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
