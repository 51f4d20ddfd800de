"""What a checkpoint consists of: its files with their block checksums, and each tensor's chunks.

`manifest.json` is this value as JSON, ending with the checksum of its own preceding bytes. Reading
and writing files is elastic/store's; what the tensors mean is
workers/train_state/serialization.py's.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from elastic.protocol.errors import DamagedCheckpoint
from elastic.protocol.layout import Box, whole

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 * 2**20
"""Files are checksummed in blocks of this size; a ranged read takes whole blocks."""
_SEAL = ',"sha256":"'


@dataclass(frozen=True, slots=True)
class Chunk(Box):
    """A box of a tensor, in C order in a file."""

    file: str
    offset: int
    """Bytes from the beginning of the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its chunks are: together they cover it once."""

    name: str
    dtype: str
    """As torch says it, without its prefix: `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    size_bytes: int
    blocks: tuple[int, ...]
    """CRC-32 (zlib's) of each block."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has durably written. Its tensors have the chunks of this part only."""

    file: StoredFile
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a rank reports of its part, for who publishes."""

    part: Part
    state: dict[str, Any] | None
    """JSON: `Manifest.state`, which the lowest rank says."""
    is_pinned: bool

    def pack(self) -> bytes:
        said = {"part": asdict(self.part), "state": self.state, "is_pinned": self.is_pinned}
        return json.dumps(said).encode()

    @classmethod
    def unpack(cls, content: bytes) -> Self:
        """The inverse of `pack`. ValueError, KeyError or TypeError for what is none."""
        said = json.loads(content)
        return cls(_part(said["part"]), said["state"], said["is_pinned"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint, after `step` committed steps."""

    step: int
    generation: int
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]
    """In the order of the state."""
    state: Any
    """JSON: what of the state is no tensor (workers/train_state/serialization.py)."""
    about: dict[str, Any]
    """JSON: seed, versions, pins: what a reader may want to know."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """The content of manifest.json."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))[:-1]
        return f'{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def decode(content: bytes, place: str) -> Manifest:
    """The inverse of `Manifest.encode`. Raises DamagedCheckpoint.

    place: what the error calls the file.
    """
    try:
        text, _, seal = content.decode().rpartition(_SEAL)
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(place, "it is cut off or no JSON") from error
    if seal != hashlib.sha256(text.encode()).hexdigest() + '"}\n':
        raise DamagedCheckpoint(place, "its checksum does not match its content")
    if value.get("format") != FORMAT:
        raise DamagedCheckpoint(place, f"format {value.get('format')!r}; this version reads 1")
    try:
        manifest = Manifest(
            step=value["step"],
            generation=value["generation"],
            files=tuple(_file(f) for f in value["files"]),
            tensors=tuple(_tensor(t) for t in value["tensors"]),
            state=value["state"],
            about=dict(value["about"]),
        )
        check_chunks(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(place, f"sealed, but no manifest: {error}") from error
    return manifest


def check_chunks(manifest: Manifest) -> None:
    """ValueError unless the chunks cover the tensors and lie in plainly named files of it."""
    _check_counts("step and generation", (manifest.step, manifest.generation))
    sizes = {file.name: file.size_bytes for file in manifest.files}
    if len(sizes) < len(manifest.files) or len({t.name for t in manifest.tensors}) < len(
        manifest.tensors
    ):
        raise ValueError("it names a file or a tensor twice")
    for file in manifest.files:
        _check_counts(f"{file.name!r}", (file.size_bytes, *file.blocks))
        if "/" in file.name or "\0" in file.name or file.name in ("", ".", ".."):
            raise ValueError(f"{file.name!r} is no file of this folder")
        if len(file.blocks) != -(-file.size_bytes // BLOCK_BYTES):
            raise ValueError(f"{file.name!r} has {len(file.blocks)} checksums of its blocks")
    for tensor in manifest.tensors:
        _check_counts(f"{tensor.name!r}", tensor.shape)
        for chunk in tensor.chunks:
            _check_counts(f"a chunk of {tensor.name!r}", (chunk.offset, *chunk.start, *chunk.shape))
            if chunk.offset > sizes[chunk.file]:
                raise ValueError(f"a chunk of {tensor.name!r} lies outside {chunk.file!r}")
            if any(end > size for end, size in zip(chunk.stop, tensor.shape, strict=True)):
                raise ValueError(f"a chunk of {tensor.name!r} lies outside of it")
        check_cover(tensor)


def _check_counts(what: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"{what}: {number!r} is no count")


def _file(value: dict[str, Any]) -> StoredFile:
    return StoredFile(_text(value["name"]), value["size_bytes"], tuple(value["blocks"]))


def _tensor(value: dict[str, Any]) -> StoredTensor:
    chunks = tuple(
        Chunk(tuple(c["start"]), tuple(c["shape"]), c["file"], c["offset"]) for c in value["chunks"]
    )
    name, dtype = _text(value["name"]), _text(value["dtype"])
    return StoredTensor(name, dtype, tuple(value["shape"]), chunks)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _part(value: dict[str, Any]) -> Part:
    return Part(_file(value["file"]), tuple(_tensor(t) for t in value["tensors"]))


def merge(parts: Iterable[Part]) -> tuple[tuple[StoredFile, ...], tuple[StoredTensor, ...]]:
    """Files and tensors of a checkpoint from every rank's part.

    ValueError if the parts disagree about a tensor, or leave or write an element twice.
    """
    files: list[StoredFile] = []
    found: dict[str, StoredTensor] = {}
    for part in parts:
        files.append(part.file)
        for tensor in part.tensors:
            known = found.get(tensor.name)
            if known is not None and (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"two parts disagree about {tensor.name!r}: {known}, {tensor}")
            chunks = (known.chunks if known else ()) + tensor.chunks
            found[tensor.name] = StoredTensor(tensor.name, tensor.dtype, tensor.shape, chunks)
    for tensor in found.values():
        check_cover(tensor)
    return tuple(files), tuple(found.values())


def check_cover(tensor: StoredTensor) -> None:
    """ValueError unless the chunks cover the tensor exactly once."""
    covered, size = sum(chunk.size for chunk in tensor.chunks), whole(tensor.shape).size
    if covered != size or not tensor.chunks:
        raise ValueError(f"{tensor.name!r}: {covered} of {size} elements saved")
    dims = range(len(tensor.shape))
    swept = max(dims, key=lambda d: len({c.start[d] for c in tensor.chunks}), default=0)
    by_start = sorted(tensor.chunks, key=lambda c: c.start[swept : swept + 1])
    for i, one in enumerate(by_start):
        for j in range(i + 1, len(by_start)):
            other = by_start[j]
            if one.shape and other.start[swept] >= one.start[swept] + one.shape[swept]:
                break  # sorted: nobody further on touches this one
            if one.intersection(other) is not None:
                raise ValueError(f"{tensor.name!r} is saved twice: {one!r} and {other!r}")
