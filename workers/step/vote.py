"""The vote that ends the preparation of a step, and all that must be agreed with it: what one rank
says (`Ballot`), its losses above all, what all have said (`Vote`), and the vector between the two.

One all-reduce of 64-bit integers. Every slot is non-zero on one rank only (or is a count), so the
sum is exact whatever order the backend adds in: losses and weights travel as the bits of a
float64. Whoever completes the vote knows that every member holds the reduced gradient.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from elastic.protocol.errors import StepCancelled, WrongInput
from elastic.protocol.step_record import VoteHead
from workers.distributed.process_group import AnyGroup
from workers.reduction.reducers import Magnitude, Reduced
from workers.reduction.tree import fold_scalars
from workers.step.timing import NO_TIMING, Pace, Timing, pace_of

_COUNTS = (
    8  # names, pause, non-finite, unknown log names, untracked buffers, busy savers, save, row
)
_OF_RANK = 3  # of each rank: gather, reduce, squares
Logged = dict[str, float | torch.Tensor]
Read: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Loss = tuple[torch.Tensor, torch.Tensor | None]
"""To differentiate, and its weight or None."""


@dataclass(frozen=True, slots=True)
class Names:
    """What votes speak of: the whole model's names, of which a rank may hold some only. Every vote
    carries their digest."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    digest: int = field(init=False)
    """48 bits of it, so that no number of ranks overflows their sum."""

    def __post_init__(self) -> None:
        joined = "\0".join((*self.parameters, "", *self.buffers)).encode()
        digest = hashlib.blake2b(joined, digest_size=6).digest()
        object.__setattr__(self, "digest", int.from_bytes(digest, "little"))


@dataclass(frozen=True, slots=True)
class VoteLayout:
    """Where things stand in the vector; equal on all members of a generation."""

    world_size: int
    num_microbatches: int
    micro_batch: int
    names: Names
    integer_buffers: tuple[str, ...]
    log_names: tuple[str, ...]

    @property
    def slots_per_microbatch(self) -> int:
        return 2 + self.micro_batch + len(self.integer_buffers) + 2 * len(self.log_names)

    @property
    def size(self) -> int:
        per_id = self.num_microbatches * self.slots_per_microbatch
        per_rank = self.world_size * (_OF_RANK + 2 * len(self.log_names))
        return _COUNTS + len(self.names.parameters) + len(self.names.buffers) + per_rank + per_id


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
    used: Set[str]
    """Parameters that one of them gave a gradient."""
    untracked: Set[str]
    """Buffers that one of them changed, and that are not tracked."""
    wants_pause: bool
    is_saving: bool
    wants_save: bool
    magnitude: Magnitude
    timing: Timing = NO_TIMING
    logged: Mapping[str, float] = field(default_factory=dict)
    """Of a rank without micro-batches of its own."""

    @property
    def of_rank(self) -> tuple[float, float, float]:
        """Numbers that only this rank has."""
        return self.timing.gather_s, self.timing.reduce_s, self.magnitude.squares

    @property
    def log_names(self) -> list[str]:
        """Of the logged values, each once, in order of appearance."""
        found = [*(record.logged for record in self.records), self.logged]
        return list(dict.fromkeys(name for logged in found for name in logged))


@dataclass(frozen=True, slots=True)
class Vote:
    """What all members agreed on for one step. Numbers per micro-batch are in id order."""

    should_pause: bool
    is_saving: bool
    """Somebody still writes an earlier checkpoint."""
    should_save: bool
    is_finite: bool
    has_unknown_names: bool
    untracked: frozenset[str]
    """Buffers that some micro-batch changed, and that are not tracked."""
    used: frozenset[str]
    """Parameters that some micro-batch gave a gradient."""
    loss: float
    divisor: float
    squares: float
    """Of all summed gradients, added up; not finite if they are not."""
    rows: np.ndarray  # int64, (global_batch,)
    user: dict[str, float]
    pace: Pace

    @property
    def rows_sha256(self) -> str:
        return hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class TakenWith:
    """What the optimizer takes a step with."""

    learning_rate: float | None = None
    """Of its first group of parameters; None if nobody knows."""
    loss_scale: float = 1.0


class Repeated(StepCancelled):
    """All ranks alike do the step again, by what they have agreed on; without regrouping."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step whose gradients are reduced here; its vote decides whether it counts."""

    reduced: Reduced
    layout: VoteLayout
    step_s: float
    generation: int
    """Of those who computed it: others may roll it forward."""
    taken_with: TakenWith = TakenWith()


# --- what is kept of each micro-batch until the vote -------------------------------------
def kept(value: float | torch.Tensor) -> float | torch.Tensor:
    """A value to be logged, as it is now. A tensor stays on its device, because to read it before
    the step's end would wait for the device. Raises what float() raises."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    return float(value)


@dataclass(frozen=True, slots=True)
class _Done:
    """One of them; loss, weight and logged values may be on a device."""

    loss: torch.Tensor
    weight: torch.Tensor | None
    rows: np.ndarray
    logged: Logged

    def values(self) -> list[float | torch.Tensor]:
        weight = [] if self.weight is None else [self.weight]
        return [self.loss, *weight, *self.logged.values()]


class Microbatches:
    """In id order; losses and logged values stay on their device until `records`."""

    def __init__(self) -> None:
        self._done: list[_Done] = []
        self._outside: Logged = {}

    def __len__(self) -> int:
        return len(self._done)

    def add(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | None,
        rows: np.ndarray,
        logged: Logged,
    ) -> None:
        self._done.append(_Done(loss.detach(), weight, rows, logged))

    def log_late(self, values: Logged) -> None:
        """Values logged after the last backward belong to the last micro-batch."""
        if not self._done:  # this rank is inactive, or another one has the loss
            self._outside.update(values)
            return
        last = self._done[-1]
        self._done[-1] = replace(last, logged={**last.logged, **values})

    def outside(self, read: Read) -> dict[str, float]:
        """What was logged on a rank without micro-batches of its own."""
        return dict(zip(self._outside, _numbers(list(self._outside.values()), read), strict=True))

    def records(
        self, ids: Iterable[int], hashes: Sequence[tuple[int, ...]], read: Read
    ) -> list[MicrobatchRecord]:
        """Losses and logged values come to the host here, once per step. hashes: of the integer
        buffers, by id. read: of the step's group. WrongInput for a weight that is no count."""
        if not self._done:  # this rank is inactive
            return []
        numbers = _numbers([value for done in self._done for value in done.values()], read)
        return [
            MicrobatchRecord(
                microbatch_id=i,
                loss=next(numbers),
                weight=weight_of(i, None if done.weight is None else next(numbers)),
                rows=done.rows,
                integer_hashes=hashed,
                logged={name: next(numbers) for name in done.logged},
            )
            for i, done, hashed in zip(ids, self._done, hashes, strict=True)
        ]


def _numbers(values: Sequence[float | torch.Tensor], read: Read) -> Iterator[float]:
    """In their order, by one read of each device."""
    found = [0.0 if isinstance(v, torch.Tensor) else v for v in values]
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, {})[i] = value.reshape(()).double()
    for tensors in by_device.values():
        numbers = read(torch.stack(list(tensors.values()))).tolist()
        for i, number in zip(tensors, numbers, strict=True):
            found[i] = number
    return iter(found)


def weight_of(microbatch_id: int, weight: float | torch.Tensor | None) -> float | None:
    of = f" of micro-batch {microbatch_id}"
    return None if weight is None else check_weight(float(weight), of)


# --- what the user's loss returns ------------------------------------------------------
def check_loss(loss: Any) -> Loss:
    """The loss as (scalar to differentiate, weight or None). Raises WrongInput.

    The value of a weight on a GPU is not looked at: that would wait for the device.
    """
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        found = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise WrongInput(
            f"loss() must return a scalar tensor (the mean over the micro-batch) or (sum, weight), "
            f"not {found}; reduce it, for example with .mean()"
        )
    if total.is_complex():
        raise WrongInput(
            "loss() must return a real floating-point number, not "
            f"{_dtype_name(total.dtype)}; take its real part or its .abs()"
        )
    if not total.requires_grad:
        raise WrongInput(
            "loss() returned a tensor without a gradient; compute it from the model's output"
        )
    return total.reshape(()), None if weight is None else _scalar(weight)


def check_weight(weight: float, of: str = "") -> float:
    """A weight is a count: a sum that is not finite skips the step, a weight never may. Raises
    WrongInput. of: which one, after a blank."""
    if not (math.isfinite(weight) and weight >= 0):
        raise WrongInput(
            f"loss()'s weight{of} is {weight:g}; it must be a finite number, 0 or more: how many "
            "samples or tokens the sum is over"
        )
    return weight


def _scalar(weight: Any) -> torch.Tensor:
    try:
        weight = torch.as_tensor(weight).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        found = type(weight).__name__
        raise WrongInput(f"loss()'s weight must be a number, not {found}") from error
    if weight.numel() != 1:
        raise WrongInput(f"loss()'s weight must be a scalar, not of shape {tuple(weight.shape)}")
    if weight.is_complex():
        raise WrongInput(f"loss()'s weight must be a real number, not {_dtype_name(weight.dtype)}")
    if weight.device.type == "cpu":
        check_weight(float(weight))
    return weight


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the vector -----------------------------------------------------------------------
def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def encode(layout: VoteLayout, ballot: Ballot) -> np.ndarray:
    """A rank's contribution: int64, (layout.size,)."""
    vector = np.zeros(layout.size, np.int64)
    vector[:_COUNTS] = (
        layout.names.digest,
        ballot.wants_pause,
        not ballot.magnitude.is_finite,
        bool(set(ballot.log_names) - set(layout.log_names)),
        bool(ballot.untracked),
        ballot.is_saving,
        ballot.wants_save,
        ballot.timing.wants_row,
    )
    used, untracked, of_ranks, outside, table = _parts(layout, vector)
    outside[ballot.timing.rank] = _logged_row(layout, ballot.logged)
    of_ranks[ballot.timing.rank] = [_bits(number) for number in ballot.of_rank]
    used[:] = [name in ballot.used for name in layout.names.parameters]
    untracked[:] = [name in ballot.untracked for name in layout.names.buffers]
    for record in ballot.records:
        assert record.weight is None or math.isfinite(record.weight)  # `weight_of` has checked
        weight = math.nan if record.weight is None else record.weight
        row = [_bits(record.loss), _bits(weight), *record.rows.tolist(), *record.integer_hashes]
        table[record.microbatch_id] = [*row, *_logged_row(layout, record.logged)]
    return vector


def _logged_row(layout: VoteLayout, logged: Mapping[str, float]) -> list[int]:
    """For each name: is it there, and its bits."""
    row: list[int] = []
    for name in layout.log_names:
        is_present = name in logged
        row += [int(is_present), _bits(logged[name]) if is_present else 0]
    return row


def _parts(layout: VoteLayout, vector: np.ndarray) -> tuple[np.ndarray, ...]:
    """Behind the counts, as views: a slot per parameter, one per buffer, two rows per rank (its own
    numbers, and what it logged outside of micro-batches), one per micro-batch."""
    at = _COUNTS + len(layout.names.parameters)
    end = at + len(layout.names.buffers)
    behind = end + layout.world_size * _OF_RANK
    last = behind + layout.world_size * 2 * len(layout.log_names)
    of_ranks, outside, table = vector[end:behind], vector[behind:last], vector[last:]
    return (
        vector[_COUNTS:at],
        vector[at:end],
        of_ranks.reshape(layout.world_size, _OF_RANK),
        outside.reshape(layout.world_size, -1),
        table.reshape(layout.num_microbatches, -1),
    )


def add_up(group: AnyGroup, vector: np.ndarray) -> np.ndarray:
    """The sum of all ranks' contributions. A collective. Raises PeerLost."""
    summed = torch.from_numpy(vector)
    group.control.all_reduce(summed).wait()
    return group.read(summed).numpy()


def decode(layout: VoteLayout, vector: np.ndarray) -> Vote:
    """The agreement in a summed vector.

    Raises ValueError if the ranks' models have other names, or micro-batches disagree on an integer
    buffer or on the kind of loss.
    """
    digests, pauses, nonfinite, unknown, _, saving, saves, rows = vector[:_COUNTS].tolist()
    _check_names(layout, digests)
    used, untracked, of_ranks, outside, table = _parts(layout, vector)
    losses, weights = np.ascontiguousarray(table[:, :2].T).view(np.float64)
    gather_s, reduce_s, squares = np.ascontiguousarray(of_ranks.T).view(np.float64)
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
    return Vote(
        should_pause=bool(pauses),
        is_saving=bool(saving),
        should_save=bool(saves),
        is_finite=not nonfinite and divisor != 0 and math.isfinite(divisor),
        has_unknown_names=bool(unknown),
        untracked=_named(layout.names.buffers, untracked),
        used=_named(layout.names.parameters, used),
        loss=fold_scalars(losses) / divisor if divisor else math.nan,
        divisor=divisor,
        squares=float(squares.sum()),
        rows=np.ascontiguousarray(table[:, 2 : 2 + layout.micro_batch]).reshape(-1),
        user=_means(layout.log_names, np.concatenate([table[:, column:], outside])),
        pace=pace_of(gather_s.tolist(), reduce_s.tolist(), wants_row=bool(rows)),
    )


def _means(log_names: tuple[str, ...], table: np.ndarray) -> dict[str, float]:
    """Of what was logged. table: int64, (micro-batches and ranks, 2 per name): is it there, and its
    bits. Equal numbers have themselves as their mean, however many there are."""
    means: dict[str, float] = {}
    for i, name in enumerate(log_names):
        present = table[:, 2 * i] > 0
        if present.any():
            values = np.ascontiguousarray(table[present, 2 * i + 1]).view(np.float64)
            is_one = bool((values == values[0]).all())
            means[name] = float(values[0]) if is_one else fold_scalars(values) / len(values)
    return means


def _check_names(layout: VoteLayout, sum_of_digests: int) -> None:
    if sum_of_digests != layout.world_size * layout.names.digest:
        raise ValueError(
            "the parameters or buffers of the model have other names, or another order, on another "
            "worker; build_model() must build the same model everywhere (an iteration over a set "
            "has another order in every process)"
        )


def _named(names: tuple[str, ...], flags: np.ndarray) -> frozenset[str]:
    return frozenset(names[i] for i in np.flatnonzero(flags))


@dataclass(frozen=True, slots=True)
class CompletedVote:
    """For a survivor that did not see it complete."""

    head: VoteHead
    content: bytes

    @classmethod
    def of(cls, step: int, layout: VoteLayout, vector: np.ndarray) -> "CompletedVote":
        return cls(VoteHead(step, layout.log_names), vector.astype("<i8").tobytes())

    def vector(self) -> np.ndarray:
        return np.frombuffer(self.content, "<i8").astype(np.int64)
