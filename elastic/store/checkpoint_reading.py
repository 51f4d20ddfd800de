"""One file of a checkpoint, read by verified blocks.

What is in it and how it is written is checkpoint_files.py's.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elastic.protocol.errors import DamagedCheckpoint
from elastic.protocol.manifest import BLOCK_BYTES, StoredFile
from elastic.store.block_format import crc32
from elastic.store.files import Folder

_MOST_VIEWS = 512
"""Pieces of memory that one system call fills (POSIX allows 1,024)."""
Range = tuple[int, memoryview]
"""Offset in the file, and memory for the bytes from there on."""


class PartReader:
    """Ranges of one file, every byte of them verified. Raises DamagedCheckpoint. Threads share it.

    Reads take whole blocks, since those have the checksums. A block is read straight into the
    memory that wants its bytes, and the rest of it into memory that is used again. OSError if the
    store does not answer, which says nothing about the file.
    """

    def __init__(self, folder: Folder, file: StoredFile) -> None:
        self._folder, self._file = folder, file
        self._scratch = threading.local()
        self.place = f"{folder}/{file.name}"
        try:
            self._stream: Any = folder.open(file.name)
        except OSError as error:
            raise_unless_missing(error)
            raise DamagedCheckpoint(self.place, f"the file is missing: {error}") from error
        self._descriptor: int | None = None
        try:
            if folder.local is not None:
                self._descriptor = os.open(folder.local / file.name, os.O_RDONLY)
            size_bytes = self._stream.size()
        except BaseException:
            self.close()
            raise
        if size_bytes != file.size_bytes:
            self.close()
            what = f"it has {size_bytes} bytes, {file.size_bytes} were written"
            raise DamagedCheckpoint(self.place, what)

    def __enter__(self) -> "PartReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """The range in pieces, in order."""
        for index, pieces in blocks_of([(offset, memoryview(bytearray(size_bytes)))]):
            self.read_block(index, pieces)
            for _, piece in pieces:
                yield piece

    def verify(self) -> Iterator[int]:
        """Read everything; yields the size of each block once it is verified."""
        for index in range(len(self._file.blocks)):
            yield self.read_block(index, ())

    def read_block(self, index: int, pieces: Sequence[Range]) -> int:
        """Fill the pieces of a block; gives the block's size.

        pieces: (offset in the file, writable memory), ascending, without overlap, in this block.
        """
        first = index * BLOCK_BYTES
        end = min(first + BLOCK_BYTES, self._file.size_bytes)
        views, at = list[memoryview](), first
        for offset, piece in (*pieces, (end, memoryview(b""))):
            if offset > at:
                views.append(self._unwanted(at - first, offset - first))
            if piece.nbytes:
                views.append(piece)
            at = offset + piece.nbytes
        try:
            count = self._read_into(views, first, end - first)
        except OSError as error:
            raise_unless_missing(error)
            raise DamagedCheckpoint(self.place, f"cannot be read: {error}") from error
        checksum = 0
        for view in views:
            checksum = crc32(view, checksum)
        if count != end - first or checksum != self._file.blocks[index]:
            what = f"bytes {first}..{end - 1} are not what was written"
            raise DamagedCheckpoint(self.place, what)
        return end - first

    def _unwanted(self, low: int, high: int) -> memoryview:
        if not hasattr(self._scratch, "block"):
            self._scratch.block = memoryview(bytearray(BLOCK_BYTES))
        return self._scratch.block[low:high]

    def _read_into(self, views: Sequence[memoryview], offset: int, size_bytes: int) -> int:
        """Gives the number of bytes."""
        if self._descriptor is not None:
            count, left = 0, list(views)
            while left:
                few = left[:_MOST_VIEWS]
                got = os.preadv(self._descriptor, few, offset + count)
                if not got:
                    break
                count += got
                left = _after(few, got) + left[_MOST_VIEWS:]
            return count
        read = memoryview(self._stream.read_at(size_bytes, offset))
        at = 0
        for view in views:
            if at + view.nbytes <= read.nbytes:
                view[:] = read[at : at + view.nbytes]
            at += view.nbytes
        return read.nbytes


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left to fill after so many bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def blocks_of(ranges: Iterable[Range]) -> Iterator[tuple[int, list[Range]]]:
    """The ranges cut at the edges of blocks: (a block's index, its pieces).

    ranges: without overlap.
    """
    pieces: dict[int, list[Range]] = {}
    for offset, memory in sorted(ranges, key=lambda r: r[0]):
        at, end = offset, offset + memory.nbytes
        while at < end:
            index = at // BLOCK_BYTES
            stop = min((index + 1) * BLOCK_BYTES, end)
            pieces.setdefault(index, []).append((at, memory[at - offset : stop - offset]))
            at = stop
    yield from pieces.items()


def raise_unless_missing(error: OSError) -> None:
    """A missing file is damage, as one that is not what was written. Other errors say nothing about
    the file: a mount whose server is away (EIO, ESTALE), a limit of this process (EMFILE)."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        raise error
