"""A state on its way out: copied while the next step computes, not while it waits.

What a state consists of is in train_state/serialization.py; who sends it is in
membership/state_stream.py.
"""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workers.distributed.captures import take_no_part
from workers.distributed.device_wait import Exit, Leaving


class HostMemory:
    """Host tensors to be used again under the same name: fresh memory costs more than a copy into
    it, one page fault per 4 KiB. Any thread gives and takes."""

    def __init__(self) -> None:
        self._free: dict[str, list[Tensor]] = {}

    def take(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Undefined content."""
        free = self._free.setdefault(name, [])
        if free and (free[-1].dtype, free[-1].shape) == (dtype, torch.Size(shape)):
            return free.pop()
        return torch.empty(shape, dtype=dtype)

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._free.setdefault(name, []).append(tensor)


class Arena:
    """One stretch of host memory for one snapshot at a time, touched before it is needed.

    What is taken beyond it, or while another thread still reserves it, is memory of its own.
    """

    def __init__(self, *, is_pinned: bool = False) -> None:
        """is_pinned: a device writes to it."""
        self._is_pinned = is_pinned
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reserve(self, shapes: Iterable[tuple[torch.dtype, Sequence[int]]]) -> None:
        """Room for such tensors. Takes its time: a page fault per 4 KiB or 2 MiB."""
        size_bytes = sum(aligned(dtype.itemsize * math.prod(shape)) for dtype, shape in shapes)
        if self._flat.nbytes < size_bytes:
            if self._is_pinned:
                take_no_part()
            self._flat = torch.empty(0, dtype=torch.uint8)  # first: never the old and the new
            flat = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._flat = flat.zero_()

    def take(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Undefined content."""
        size_bytes = dtype.itemsize * math.prod(shape)
        flat, first = self._flat, self._used
        self._used += aligned(size_bytes)
        if self._used > flat.nbytes:
            return torch.empty(shape, dtype=dtype)
        return flat[first : first + size_bytes].view(dtype).view(shape)

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """All that were taken."""
        self._used = 0


def aligned(size_bytes: int) -> int:
    """As an arena places tensors: from one cache line on."""
    return -(-size_bytes // 64) * 64


class Snapshot:
    """The state of one committed step, for one reader.

    Nobody changes parameters and optimizer state between two optimizer steps, so the reader copies
    them one by one from its own thread; whoever is about to change them calls `settle` first, which
    copies what is left. What is on a device leaves it by a stream of its own: the reader waits for
    it, and so does whatever the device is asked to change, but no host.
    """

    def __init__(
        self,
        header: dict[str, Any],
        tensors: Mapping[str, Tensor],
        memory: HostMemory | Arena | None = None,
    ) -> None:
        """tensors: live, on any device; nothing but `settle` may come before they change.
        memory: where the copies are made; its owner may give them back when they are used up."""
        self.header = header
        self._memory = memory or HostMemory()
        self.shapes = {name: (t.dtype, t.shape) for name, t in tensors.items()}
        """dtype and shape of each tensor, in order."""
        self._left: dict[str, Tensor | Leaving] = dict(tensors)
        devices = {t.device for t in tensors.values() if t.device.type not in ("cpu", "meta")}
        self._exits = {device: Exit(device) for device in devices}
        self._lock = threading.Lock()

    def take(self, name: str) -> Tensor:
        """A contiguous copy on the host; each name once."""
        with self._lock:
            copy = self._copied(name, self._left.pop(name))
        return copy.wait()

    def taken(self) -> dict[str, Tensor]:
        """All that is left."""
        return {name: self.take(name) for name in list(self._left)}

    @property
    def size_bytes(self) -> int:
        return sum(dtype.itemsize * shape.numel() for dtype, shape in self.shapes.values())

    def settle(self) -> None:
        """The state may change once this returns."""
        with self._lock:
            self._left = {name: self._copied(name, t) for name, t in self._left.items()}
            for exit_ in self._exits.values():
                exit_.hold()

    def drop(self) -> None:
        """The reader is gone."""
        with self._lock:
            self._left.clear()

    def _copied(self, name: str, tensor: Tensor | Leaving) -> Leaving:
        """A contiguous copy in the host's memory."""
        if isinstance(tensor, Leaving):
            return tensor
        target = self._memory.take(name, tensor.dtype, tensor.shape)
        if (exit_ := self._exits.get(tensor.device)) is not None:
            return exit_.leave(tensor.detach(), target)
        return Leaving(target.copy_(tensor.detach()))
