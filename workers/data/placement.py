"""Batches on their way to the device."""

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`, of the type that it has; through pinned memory
    where that is a GPU."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory().to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):  # a BatchEncoding, a PackedSequence
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return moved
        whole = copy(batch)  # its type may want more than its items
        whole.update(moved)
        return whole
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in fields(batch) if f.init}
        return replace(batch, **{name: to_device(v, device) for name, v in values.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        # A sequence's type is assumed to take an iterable, as list's and tuple's do.
        return type(batch)(to_device(value, device) for value in batch)  # pyright: ignore[reportCallIssue]
    return batch
