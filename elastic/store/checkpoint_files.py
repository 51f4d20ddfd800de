"""One file of a checkpoint: safetensors, written front to back, read by verified blocks.

The format is safetensors' (huggingface.co/docs/safetensors), written by hand because a file is
streamed here while its tensors are still being copied, and checksummed on the way. Which files
make a checkpoint is catalogue.py's.
"""

import json
import math
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import BLOCK_BYTES, Chunk, Part, StoredFile, StoredTensor
from elastic.store.files import Folder, sync_directory

SAFETENSORS_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""torch's name -> safetensors' name and bytes per element."""
KEPT_BLOCKS = 4
"""Verified blocks that a reader keeps: neighbouring ranges share one."""


@dataclass(frozen=True, slots=True)
class Box:
    """What a rank saves of one tensor: its rows `start` .. in each dim."""

    name: str
    dtype: str
    tensor_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype, self.name)


def element_bytes(dtype: str, name: str) -> int:
    """WrongInput for a dtype that the format has no word for."""
    if dtype not in SAFETENSORS_DTYPES:
        raise WrongInput(f"{name!r} is {dtype}, which a checkpoint cannot hold; use another dtype")
    return SAFETENSORS_DTYPES[dtype][1]


def write_part(
    folder: Folder, file: str, boxes: Sequence[Box], contents: Iterable[memoryview]
) -> Part:
    """Write `file` durably: one tensor per box, each box's bytes in C order from `contents`.

    `contents` is consumed one by one, so that each may be made just before it is written. Raises
    OSError; whatever `contents` raises passes through. Nothing refers to the file until a manifest
    does.
    """
    header, offsets = safetensors_header(boxes)
    with _Output(folder, file) as output:
        output.write(memoryview(header))
        for box, content in zip(boxes, contents, strict=True):
            flat = content.cast("B") if content.nbytes else content
            assert flat.nbytes == box.size_bytes, (box, flat.nbytes)
            output.write(flat)
    tensors = tuple(
        StoredTensor(b.name, b.dtype, b.tensor_shape, (Chunk(file, at, b.start, b.shape),))
        for b, at in zip(boxes, offsets, strict=True)
    )
    return Part(StoredFile(file, output.size_bytes, tuple(output.blocks)), tensors)


def safetensors_header(boxes: Sequence[Box]) -> tuple[bytes, list[int]]:
    """The beginning of the file, and where each box begins in it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, offsets = 0, list[int]()
    for box in boxes:
        end = at + box.size_bytes
        kind = SAFETENSORS_DTYPES[box.dtype][0]
        entries[box.name] = {"dtype": kind, "shape": box.shape, "data_offsets": [at, end]}
        offsets.append(at)
        at = end
    assert len(entries) == len(boxes) + 1, "two boxes of one name in one file"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, [len(header) + offset for offset in offsets]


class _Output:
    """A file being written, and the checksums of its blocks."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self.size_bytes = 0
        self.blocks: list[int] = []
        self._crc: int = 0
        self._filled: int = 0

    def __enter__(self) -> "_Output":
        local = self._folder.local
        if local is not None:
            self._stream: Any = (local / self._name).open("wb", buffering=0)
        else:
            self._stream = self._folder.filesystem.open_output_stream(
                self._folder.path_of(self._name)
            )
        return self

    def write(self, content: memoryview) -> None:
        while content.nbytes:
            piece = content[: BLOCK_BYTES - self._filled]
            self._write_all(piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += piece.nbytes
            self.size_bytes += piece.nbytes
            if self._filled == BLOCK_BYTES:
                self._end_block()
            content = content[piece.nbytes :]

    def _write_all(self, piece: memoryview) -> None:
        if self._folder.local is None:
            self._stream.write(piece)
            return
        while piece.nbytes:
            piece = piece[self._stream.write(piece) :]

    def _end_block(self) -> None:
        self.blocks.append(self._crc)
        self._crc, self._filled = 0, 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._filled:
            self._end_block()
        local = self._folder.local
        if kind is not None and local is None:
            self._give_up(is_broken=issubclass(kind, OSError))
            return
        try:
            if kind is None and local is not None:
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()
        if kind is None and local is not None:
            sync_directory(local)

    def _give_up(self, *, is_broken: bool) -> None:
        """Closing completes an upload that is not broken: what is there then is removed again."""
        with suppress(OSError):
            self._stream.close()
            if not is_broken:
                self._folder.delete(self._name)


def raise_unless_damage(folder: Folder, error: OSError) -> None:
    """A store that does not answer says nothing about a file; a local disk that fails does."""
    if folder.local is None and not isinstance(error, FileNotFoundError):
        raise error


class PartReader:
    """Ranges of one file, every byte of them verified. Raises DamagedCheckpoint; OSError if the
    store does not answer."""

    def __init__(self, folder: Folder, file: StoredFile) -> None:
        self._folder, self._file = folder, file
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._memory = [bytearray(BLOCK_BYTES) for _ in range(KEPT_BLOCKS)]
        self.place = f"{folder}/{file.name}"
        try:
            self._stream: Any = folder.open(file.name)
        except OSError as error:
            raise_unless_damage(folder, error)
            raise DamagedCheckpoint(self.place, "the file is missing") from error
        local = folder.local
        self._descriptor = None if local is None else os.open(local / file.name, os.O_RDONLY)
        size_bytes = self._stream.size()
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
        """The range in pieces, in order; a piece is valid until the next one is asked for."""
        at, end = offset, offset + size_bytes
        while at < end:
            index = at // BLOCK_BYTES
            first = index * BLOCK_BYTES
            block = self._block(index)
            yield block[at - first : end - first]
            at = first + len(block)

    def verify(self) -> Iterator[int]:
        """Read everything; yields the size of each block once it is verified."""
        for index in range(len(self._file.blocks)):
            yield len(self._block(index))

    def _block(self, index: int) -> memoryview:
        if index not in self._kept:
            if not self._memory:  # memory that was touched already is much faster
                self._memory.append(cast(bytearray, self._kept.popitem(last=False)[1].obj))
            first = index * BLOCK_BYTES
            size = min(BLOCK_BYTES, self._file.size_bytes - first)
            content = memoryview(self._memory.pop())[:size]
            try:
                count = self._read_into(content, first)
            except OSError as error:
                raise_unless_damage(self._folder, error)
                raise DamagedCheckpoint(self.place, f"cannot be read: {error}") from error
            if count != size or zlib.crc32(content) != self._file.blocks[index]:
                what = f"bytes {first}..{first + size - 1} are not what was written"
                raise DamagedCheckpoint(self.place, what)
            self._kept[index] = content
        self._kept.move_to_end(index)
        return self._kept[index]

    def _read_into(self, content: memoryview, offset: int) -> int:
        if self._descriptor is not None:
            return os.preadv(self._descriptor, [content], offset)
        read: bytes = self._stream.read_at(content.nbytes, offset)
        content[: len(read)] = read
        return len(read)
