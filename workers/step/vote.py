"""The vote that ends the preparation of a step, and all that must be agreed with it: what one rank
says (`Ballot`), what all have said (`Vote`), and the vector between the two.

One all-reduce of 64-bit integers. Every slot is non-zero on one rank only (or is a count), so the
sum is exact whatever order the backend adds in: losses and weights travel as the bits of a
float64. Whoever completes the vote knows that every member holds the reduced gradient.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.distributed.process_group import AnyGroup
from workers.reduction.reducers import Reduced
from workers.reduction.tree import fold_scalars

_COUNTS = 6  # pause, non-finite, unknown log names, untracked buffers, busy savers, save


@dataclass(frozen=True, slots=True)
class VoteLayout:
    """Where things stand in the vector; equal on all members of a generation."""

    num_microbatches: int
    micro_batch: int
    num_parameters: int
    num_buffers: int
    integer_buffers: tuple[str, ...]
    log_names: tuple[str, ...]

    @property
    def slots_per_microbatch(self) -> int:
        return 2 + self.micro_batch + len(self.integer_buffers) + 2 * len(self.log_names)

    @property
    def size(self) -> int:
        per_id = self.num_microbatches * self.slots_per_microbatch
        return _COUNTS + self.num_parameters + self.num_buffers + per_id


@dataclass(frozen=True, slots=True)
class MicrobatchRecord:
    """What one rank knows of one micro-batch that it computed."""

    microbatch_id: int
    loss: float
    weight: float | None
    rows: np.ndarray  # int64, (micro_batch,)
    integer_hashes: tuple[int, ...]
    logged: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says."""

    records: Sequence[MicrobatchRecord]
    """Of its own micro-batches."""
    used: Sequence[bool]
    """Per parameter: one of them gave it a gradient."""
    untracked: Sequence[bool]
    """Per buffer: one of them changed it, and it is not tracked."""
    wants_pause: bool
    is_saving: bool
    wants_save: bool
    is_finite: bool

    @property
    def log_names(self) -> list[str]:
        """Of the logged values, each once, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record.logged))


@dataclass(frozen=True, slots=True)
class Vote:
    """What all members agreed on for one step. Numbers per micro-batch are in id order."""

    should_pause: bool
    is_saving: bool
    """Somebody still writes an earlier checkpoint."""
    should_save: bool
    is_finite: bool
    has_unknown_names: bool
    untracked_buffers: tuple[int, ...]
    used: tuple[bool, ...]
    """Per parameter: some micro-batch gave it a gradient."""
    loss: float
    divisor: float
    rows: np.ndarray  # int64, (global_batch,)
    user: dict[str, float]

    @property
    def rows_sha256(self) -> str:
        return hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step whose gradients are reduced here; its vote decides whether it counts."""

    reduced: Reduced
    layout: VoteLayout
    step_s: float
    generation: int
    world_size: int
    """Of those who computed it: others may roll it forward."""


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def encode(layout: VoteLayout, ballot: Ballot) -> np.ndarray:
    """A rank's contribution: int64, (layout.size,)."""
    vector = np.zeros(layout.size, np.int64)
    known = set(layout.log_names)
    has_unknown = any(name not in known for r in ballot.records for name in r.logged)
    others = (has_unknown, any(ballot.untracked), ballot.is_saving, ballot.wants_save)
    vector[:_COUNTS] = ballot.wants_pause, not ballot.is_finite, *others
    at = _COUNTS
    vector[at : at + layout.num_parameters] = ballot.used
    at += layout.num_parameters
    vector[at : at + layout.num_buffers] = ballot.untracked
    table = vector[at + layout.num_buffers :].reshape(layout.num_microbatches, -1)
    for record in ballot.records:
        assert record.weight is None or math.isfinite(record.weight)  # loss.py has checked it
        weight = math.nan if record.weight is None else record.weight
        row = [_bits(record.loss), _bits(weight), *record.rows.tolist(), *record.integer_hashes]
        for name in layout.log_names:
            is_present = name in record.logged
            row += [int(is_present), _bits(record.logged[name]) if is_present else 0]
        table[record.microbatch_id] = row
    return vector


def add_up(group: AnyGroup, vector: np.ndarray) -> np.ndarray:
    """The sum of all ranks' contributions. A collective. Raises PeerLost."""
    summed = torch.from_numpy(vector)
    group.control.all_reduce(summed).wait()
    return group.read(summed).numpy()


def decode(layout: VoteLayout, vector: np.ndarray) -> Vote:
    """The agreement in a summed vector.

    Raises ValueError if micro-batches disagree on an integer buffer or on the kind of loss.
    """
    counts, at = vector[:_COUNTS], _COUNTS
    used = vector[at : at + layout.num_parameters] > 0
    at += layout.num_parameters
    untracked = tuple(int(i) for i in np.flatnonzero(vector[at : at + layout.num_buffers]))
    table = vector[at + layout.num_buffers :].reshape(layout.num_microbatches, -1)
    losses, weights = table[:, 0].view(np.float64), table[:, 1].view(np.float64)
    losses, weights = np.ascontiguousarray(losses), np.ascontiguousarray(weights)
    is_weighted = ~np.isnan(weights)
    if is_weighted.any() and not is_weighted.all():
        raise ValueError(
            "loss() returned a scalar for some micro-batches and (sum, weight) for others; "
            "return one kind for all"
        )
    divisor = fold_scalars(weights) if is_weighted.all() else float(layout.num_microbatches)
    column = 2 + layout.micro_batch
    for i, name in enumerate(layout.integer_buffers):
        if (table[:, column + i] != table[0, column + i]).any():
            raise ValueError(
                f"integer buffer {name!r} differs between the micro-batches of one step; its new "
                "value must not depend on the samples (keep it as a floating buffer, or outside)"
            )
    column += len(layout.integer_buffers)
    user: dict[str, float] = {}
    for i, name in enumerate(layout.log_names):
        present = table[:, column + 2 * i] > 0
        if present.any():
            values = np.ascontiguousarray(table[present, column + 2 * i + 1]).view(np.float64)
            user[name] = fold_scalars(values) / int(present.sum())
    total = fold_scalars(losses)
    return Vote(
        should_pause=bool(counts[0]),
        is_saving=bool(counts[4]),
        should_save=bool(counts[5]),
        is_finite=not counts[1] and divisor != 0 and math.isfinite(divisor),
        has_unknown_names=bool(counts[2]),
        untracked_buffers=untracked,
        used=tuple(bool(u) for u in used),
        loss=total / divisor if divisor else math.nan,
        divisor=divisor,
        rows=np.ascontiguousarray(table[:, 2 : 2 + layout.micro_batch]).reshape(-1),
        user=user,
    )


def dump(layout: VoteLayout, vector: np.ndarray) -> tuple[dict[str, object], bytes]:
    """A completed vote for a survivor that did not see it complete."""
    return {"log_names": list(layout.log_names)}, vector.astype("<i8").tobytes()
