"""How a step's gradients are summed over micro-batches and ranks: `Reducer`, and what it gives.

Stock all-reduces are in fast.py, the canonical tree in bitwise.py, what shards need in parallel/.

A reducer belongs to one generation: an abandoned collective may still write into its buffers.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.tensors.local import local
from workers.torch_private.tensors import norms_of


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Of a step's gradients, which are sums."""

    is_finite: bool
    """Every number that this rank has of them is."""
    squares: float
    """Of the numbers that are this rank's own, added up; only if all are finite it means
    something."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """Sums over all micro-batches of a step, by name: on every rank, or a rank's rows where
    sharded."""

    gradients: Mapping[str, torch.Tensor]
    """Of the parameters, in their order; those without are known with one rank only."""
    buffers: Mapping[str, torch.Tensor]
    """The tracked floating buffers, float64."""
    squares: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Of all rows of each gradient, on the host; empty where nothing is clipped."""

    @property
    def are_squares_known(self) -> bool:
        """Those of every gradient, on every rank."""
        return bool(self.gradients) and self.squares.keys() >= self.gradients.keys()

    def magnitude(
        self, read: Callable[[torch.Tensor], torch.Tensor], own: Set[str] = frozenset()
    ) -> Magnitude:
        """read: of the group that has summed them. own: names of those that are this rank's own.
        One pass tells both, and none where the norm is known: squares of finite numbers are finite
        in float64 (of float64 up to 1e154)."""
        if self.are_squares_known:
            squares = float(torch.cat([self.squares[name] for name in self.gradients]).sum())
            return Magnitude(math.isfinite(squares), squares if own else 0.0)
        by_device: dict[torch.device, list[str]] = {}  # shards may be in host memory
        for name, gradient in self.gradients.items():
            by_device.setdefault(gradient.device, []).append(name)
        norms: list[float] = []
        total = 0.0
        for names in by_device.values():
            each = norms_of([local(self.gradients[name]) for name in names])
            found = read(torch.stack([norm.float() for norm in each])).tolist()
            norms += found
            total += sum(n * n for name, n in zip(names, found, strict=True) if name in own)
        return Magnitude(all(map(math.isfinite, norms)), total)


class Reducer(Protocol):
    def begin(self) -> None:
        """Before the first micro-batch of every attempt at a step."""
        ...

    def before_backward(self, is_last: bool) -> None: ...

    def after_backward(self, microbatch_id: int, buffers: Sequence[torch.Tensor]) -> None: ...

    def serve_pass(self) -> None:
        """Where other ranks have a micro-batch more: do for their pass what they need of this one.
        After a pass of its own in this step. Raises what a backward raises."""
        ...

    @property
    def used(self) -> Set[str]:
        """Parameters that the micro-batch just finished, or one before it, gave a gradient."""
        ...

    def finish(self) -> Reduced:
        """A collective. Raises PeerLost. The result is valid until the next `begin`."""
        ...

    def close(self) -> None: ...
