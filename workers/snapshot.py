"""A state on its way out: copied while the next step computes, not while it waits.

What a state consists of is in state.py; who sends it is in peer.py.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """The state of one committed step, for one reader.

    Nobody changes parameters and optimizer state between two optimizer steps, so the reader copies
    them one by one from its own thread; whoever is about to change them calls `settle` first, which
    copies what is left.
    """

    def __init__(self, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """tensors: live, on any device; nothing but `settle` may come before they change."""
        self.header = header
        self.shapes = {name: (t.dtype, t.shape) for name, t in tensors.items()}
        """dtype and shape of each tensor, in order."""
        self._left = dict(tensors)
        self._is_settled = False
        self._lock = threading.Lock()

    def take(self, name: str) -> Tensor:
        """A contiguous copy on the host; each name once."""
        with self._lock:
            tensor = self._left.pop(name)
            return tensor if self._is_settled else on_host(tensor)

    def settle(self) -> None:
        """The state may change once this returns."""
        with self._lock:
            if not self._is_settled:
                self._left = {name: on_host(t) for name, t in self._left.items()}
                self._is_settled = True

    def drop(self) -> None:
        """The reader is gone."""
        with self._lock:
            self._left.clear()


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous copy in the host's memory."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return host.copy_(tensor.detach())
