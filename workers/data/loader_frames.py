"""Messages between a worker and its loader processes, over a socket that keeps boundaries.

A small payload travels in the message, a large one in anonymous shared memory whose descriptor
does; both arrive without a copy per tensor and at fixed alignments (64 bytes, a page), because
kernels may choose their order of addition by alignment. Pickle is fine here: both ends are one
program, forked from each other.
"""

import array
import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

READY, REFUSED, FAILED, LOADED, RAISED, FED = range(6)
"""Kinds of message: the dataset's length; why it cannot be used; dataset() raised; a
micro-batch; the user's code raised for a micro-batch; a pickled source that is fed from elsewhere
(empty: `dataset()` has to be called where Ray can be used)."""

SOCKET_BYTES = 1 << 20
TAKEN = b"taken"
_INLINE_BYTES = 16 << 10
_MAX_BUFFERS = 1000
_MESSAGE_BYTES = 32 << 10
_PAGE, _LINE = mmap.PAGESIZE, 64
_HEAD = struct.Struct("<BBxxIqqI")  # kind, is_shared, assignment, step, id, number of buffers
_ASSIGN = struct.Struct("<Iqqqqq")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a loader process must know before it starts."""

    seed: int
    global_batch: int
    micro_batch: int
    index: int
    num_processes: int
    enter_child: Callable[[], None] = lambda: None
    """What a forked process has to do first."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Load `ids` of `step`, step + 1, ...; num_steps 0 means without end."""

    number: int
    step: int
    ids: range
    num_steps: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A message as received; `value()` builds the objects in it."""

    kind: int
    assignment: int
    step: int
    microbatch_id: int
    parts: list[memoryview]

    def value(self) -> Any:
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


def assign_command(number: int, step: int, ids: range, num_steps: int) -> bytes:
    return _ASSIGN.pack(number, step, ids.start, ids.stop, ids.step, num_steps)


def read_assignment(command: bytes) -> Assignment:
    number, step, start, stop, stride, num_steps = _ASSIGN.unpack(command)
    return Assignment(number, step, range(start, stop, stride), num_steps)


def send(
    connection: socket.socket,
    kind: int,
    value: object,
    *,
    assignment: int = 0,
    step: int = 0,
    microbatch_id: int = 0,
) -> None:
    send_parts(
        connection,
        kind,
        pickled(value),
        assignment=assignment,
        step=step,
        microbatch_id=microbatch_id,
    )


def send_parts(
    connection: socket.socket,
    kind: int,
    parts: Sequence[memoryview],
    *,
    assignment: int,
    step: int,
    microbatch_id: int,
) -> None:
    """`send` of what `pickled` gave."""
    sizes = struct.pack(f"<{len(parts)}Q", *(p.nbytes for p in parts))
    is_shared = sum(p.nbytes for p in parts) + _LINE * len(parts) > _INLINE_BYTES
    head = _HEAD.pack(kind, is_shared, assignment, step, microbatch_id, len(parts)) + sizes
    if not is_shared:
        connection.sendmsg([head, *parts])
        return
    descriptor = os.memfd_create("loaded")
    try:
        offsets, size = _offsets([p.nbytes for p in parts], _PAGE)
        os.ftruncate(descriptor, size)
        for part, offset in zip(parts, offsets, strict=True):
            written = 0
            while written < part.nbytes:
                written += os.pwrite(descriptor, part[written:], offset + written)
        rights = array.array("i", [descriptor])
        connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(descriptor)


def receive(connection: socket.socket) -> Frame | None:
    """The next message, or None at the end of the stream."""
    message, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4))
    if not message:
        return None
    kind, is_shared, assignment, step, microbatch_id, count = _HEAD.unpack_from(message)
    sizes = struct.unpack_from(f"<{count}Q", message, _HEAD.size)
    if is_shared:
        descriptor = array.array("i", ancillary[0][2])[0]
        parts = _mapped(descriptor, sizes)
    else:
        parts = _copied(memoryview(message)[_HEAD.size + 8 * count :], sizes)
    return Frame(kind, assignment, step, microbatch_id, parts)


def _mapped(descriptor: int, sizes: Sequence[int]) -> list[memoryview]:
    offsets, size = _offsets(sizes, _PAGE)
    try:
        whole = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(descriptor)
    return [whole[at : at + n] for at, n in zip(offsets, sizes, strict=True)]


def _copied(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    offsets, size = _offsets(sizes, _LINE)
    aligned: Any = torch.empty(max(size, 1), dtype=torch.uint8).numpy()  # to 64 bytes
    whole = memoryview(aligned)
    parts: list[memoryview] = []
    start = 0
    for at, n in zip(offsets, sizes, strict=True):
        part = whole[at : at + n]
        part[:] = body[start : start + n]
        parts.append(part)
        start += n
    return parts


def _offsets(sizes: Sequence[int], alignment: int) -> tuple[list[int], int]:
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // alignment) * alignment
    return offsets, end


class _Pickler(pickle.Pickler):
    """Plain dense tensors travel as bytes beside the pickle, as numpy arrays do anyway."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg():
            return NotImplemented
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        plain: Any = obj.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(plain), obj.dtype, tuple(obj.shape))


def pickled(value: object) -> list[memoryview]:
    """Raises what the value's own pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    if len(buffers) > _MAX_BUFFERS:
        stream, buffers = io.BytesIO(), []
        _Pickler(stream, protocol=5).dump(value)
    return [stream.getbuffer(), *(b.raw() for b in buffers)]


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
