"""Batches on their way to the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`; through pinned memory where that is a GPU."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory().to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        # A sequence's type is assumed to take an iterable, as list's and tuple's do.
        return type(batch)(to_device(value, device) for value in batch)  # pyright: ignore[reportCallIssue]
    return batch
