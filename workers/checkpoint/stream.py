"""A checkpoint read from outside a run: its state as a tree, its tensors one by one when asked for.

The model that wrote it need not be importable. Restoring a replica is load.py's; the
formats of others are export.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from elastic.protocol.manifest import Manifest, StoredTensor
from elastic.store.catalogue import Catalogue
from workers.checkpoint.load import read_tensors
from workers.train_state.serialization import decode
from workers.train_state.state_header import entry, names_in, weights_of

OnBytes = Callable[[int], object]
"""Is told how many bytes of tensors went by."""
SMALL_BYTES = 64 * 2**10
"""Smaller tensors are read together, once: a read takes whole blocks."""


def ignore(size_bytes: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a tensor of the checkpoint in a tree of values."""

    stored: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def to(self, *_: object, **__: object) -> "Reference":
        """As `decode` moves what it finds."""
        return self


class CheckpointReader:
    """One checkpoint. Whatever reads its tensors raises DamagedCheckpoint."""

    def __init__(self, catalogue: Catalogue, step: int, on_bytes: OnBytes = ignore) -> None:
        """Raises DamagedCheckpoint if the manifest is not sound."""
        self.manifest: Manifest = catalogue.manifest(step)
        self.tensors = {t.name: t for t in self.manifest.tensors}
        self._catalogue, self._on_bytes = catalogue, on_bytes
        self._small: dict[str, Tensor] | None = None

    @property
    def weights(self) -> dict[str, str]:
        """Name in the state dict -> name of the stored tensor; tied ones share it."""
        return weights_of(self.manifest.state, self.tensors)

    def read(self, stored: str) -> Tensor:
        """On the host, every byte verified."""
        described = self.tensors[stored]
        if size_bytes(described) < SMALL_BYTES:
            tensor = self._read_small()[stored]
        else:
            tensor = self._read((described,))[stored]
        self._on_bytes(tensor.nbytes)
        return tensor

    def _read_small(self) -> dict[str, Tensor]:
        if self._small is None:
            small = (t for t in self.manifest.tensors if size_bytes(t) < SMALL_BYTES)
            self._small = self._read(tuple(small))
        return self._small

    def _read(self, wanted: tuple[StoredTensor, ...]) -> dict[str, Tensor]:
        return read_tensors(self._catalogue, replace(self.manifest, tensors=wanted))

    @property
    def _values(self) -> dict[str, Any]:
        return entry(self.manifest.state, "values", dict)

    @property
    def _extra(self) -> dict[str, Any]:
        return entry(self._values, "extra", dict)

    @property
    def has_extra_state(self) -> bool:
        return bool(self._extra)

    @property
    def _optimizer(self) -> dict[str, Any]:
        return entry(self._values, "optimizer", dict)

    # --- the state, tensors as References ---------------------------------------------
    def reference(self, stored: str) -> Reference:
        described = self.tensors[stored]
        return Reference(stored, getattr(torch, described.dtype), described.shape)

    def model(self) -> dict[str, Any]:
        """The model's state dict: weights under every name, and extra state."""
        extra = self._extra
        found: dict[str, Any] = {n: self.reference(s) for n, s in self.weights.items()}
        for module, encoded in extra.items():
            found[f"{module}." * bool(module) + "_extra_state"] = self.tree(encoded)
        return found

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Options and, under `params`, names."""
        found: list[dict[str, Any]] = []
        for group in entry(self._optimizer, "groups", list):
            options = {"options": self.tree(entry(group, "options", dict))}
            found.append({**entry(options, "options", dict), "params": names_in(group, "params")})
        return found

    def optimizer_state(self) -> dict[str, Any]:
        """By the name of the parameter."""
        state = entry(self._optimizer, "state", dict)
        return {name: self.tree(encoded) for name, encoded in state.items()}

    def optimizer_shared(self) -> dict[str, Any]:
        """What an optimizer keeps under keys that are no parameters."""
        shared = entry(self._optimizer, "shared", dict)
        return {name: self.tree(encoded) for name, encoded in shared.items()}

    def scheduler(self) -> Any | None:
        encoded = entry(self._values, "scheduler", object)
        return None if encoded is None else self.tree(encoded)

    def tree(self, encoded: Any) -> Any:
        references = {name: self.reference(name) for name in self.tensors}
        return decode(encoded, cast(Mapping[str, Tensor], references))


def size_bytes(stored: StoredTensor) -> int:
    return torch.Size(stored.shape).numel() * getattr(torch, stored.dtype).itemsize


def filled(value: Any, fill: Callable[[Reference], object]) -> Any:
    """A tree with `fill(reference)` in place of each Reference."""
    if isinstance(value, Reference):
        return fill(value)
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value).items()
        made = {k: filled(v, fill) for k, v in pairs}
        return made if type(value) is dict else cast(Any, type(value))(made)
    if type(value) in (list, tuple):
        return type(value)(filled(v, fill) for v in value)
    return value
