"""Two checkpoints compared: names, dtypes, shapes, and every element's bits.

Two tensors are in memory at a time. Printing is elastic/cli/checkpoint_compare.py's.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.checkpoint.stream import CheckpointReader
from workers.train_state.state_header import entry

PIECE = 2**22
"""Elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor that is not of one dtype and shape in both."""

    name: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Unequal:
    """A tensor whose bits differ."""

    name: str
    num_different: int
    """Elements."""
    num_elements: int
    max_abs: float
    """The largest difference; NaN if one is not a number in one of the two only."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What one checkpoint has and another has not, or has otherwise."""

    num_equal: int
    """Tensors."""
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    kinds: tuple[Kind, ...]
    unequal: tuple[Unequal, ...]
    others: tuple[str, ...]
    """Parts of the state that is no tensors: weights (names), optimizer, scheduler, extra."""

    @property
    def is_empty(self) -> bool:
        found = (self.only_here, self.only_there, self.kinds, self.unequal, self.others)
        return not any(found)


def compare(here: CheckpointReader, there: CheckpointReader, prefix: str = "") -> Difference:
    """Of the tensors whose names begin with `prefix`. Raises DamagedCheckpoint."""
    names = [n for n in here.tensors if n.startswith(prefix)]
    others = [n for n in there.tensors if n.startswith(prefix)]
    kinds: list[Kind] = []
    unequal: list[Unequal] = []
    num_equal = 0
    for name in (n for n in names if n in there.tensors):
        one, two = here.tensors[name], there.tensors[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            said = (f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in (one, two))
            kinds.append(Kind(name, *said))
            continue
        found = compare_tensors(name, here.read(name), there.read(name))
        if found.num_different:
            unequal.append(found)
        else:
            num_equal += 1
    return Difference(
        num_equal,
        tuple(n for n in names if n not in there.tensors),
        tuple(n for n in others if n not in here.tensors),
        tuple(kinds),
        tuple(unequal),
        tuple(_other_parts(here.manifest.state, there.manifest.state, is_whole=not prefix)),
    )


def _other_parts(here: Any, there: Any, *, is_whole: bool) -> list[str]:
    found = ["weights"] if entry(here, "weights", dict) != entry(there, "weights", dict) else []
    for part in ("optimizer", "scheduler", "extra") if is_whole else ():
        values = (entry(state, "values", dict) for state in (here, there))
        one, two = (json.dumps(entry(each, part, object)) for each in values)
        found += [part] if one != two else []
    return found


def compare_tensors(name: str, one: Tensor, two: Tensor) -> Unequal:
    """Of one dtype and shape, contiguous."""
    num_different, largest = 0, 0.0
    for a, b in zip(one.reshape(-1).split(PIECE), two.reshape(-1).split(PIECE), strict=True):
        bits = (t.view(torch.uint8).view(t.numel(), -1) for t in (a, b) if t.numel())
        pair = tuple(bits)
        is_different = (pair[0] != pair[1]).any(1) if pair else torch.zeros(0, dtype=torch.bool)
        count = int(is_different.sum())
        if count:
            num_different += count
            distance = _distance(a[is_different], b[is_different])
            largest = math.nan if math.isnan(distance + largest) else max(largest, distance)
    return Unequal(name, num_different, one.numel(), largest)


def _distance(one: Tensor, two: Tensor) -> float:
    """The largest absolute difference. Two NaNs, or equal infinities, are no distance apart."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), two.to(wide)
    distance = (a - b).abs()
    is_same = (a == b) | (a.isnan() & b.isnan())
    return float(distance.masked_fill(is_same, 0.0).max())
