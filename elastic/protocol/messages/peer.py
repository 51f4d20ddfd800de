"""What a worker sends who follows it: its state, then what each step changes. Answered by nothing,
and asked for by `Wanted` where only a part is.

The tensors that a message names follow it, one after the other, as they are in memory.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from elastic.protocol.layout import BlockSets
from elastic.protocol.messages.direction import Direction
from elastic.protocol.step_record import STEP_RECORD, KnownSteps

TensorShapes: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype and shape of each, in the order in which they follow."""


@dataclass(frozen=True, slots=True)
class State:
    """After a step: the whole of it, or, of a model in stages, what was asked for; the tensors of
    other blocks come without elements."""

    state: dict[str, Any]
    """What `TrainState.restore` takes beside the tensors."""
    records: KnownSteps
    queued: int
    """So many messages wait to be sent after this one."""
    tensors: TensorShapes


@dataclass(frozen=True, slots=True)
class Update:
    """What one step changes (workers/train_state/train_state.py): the tensors gradient/NAME of
    parameters, buffer/NAME and integer/NAME of floating and other buffers, and, where these are in
    parts, square/NAME of the rows of gradients."""

    step: int
    is_finite: bool
    divisor: float
    num_microbatches: int
    log_names: tuple[str, ...]
    records: KnownSteps
    origin: int = 0
    """The generation that computed it."""
    queued: int = 0
    tensors: TensorShapes = ()


@dataclass(frozen=True, slots=True)
class Lags:
    """Nothing comes any more until a generation takes the follower in."""

    queued: int = 0
    tensors: TensorShapes = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of a model in stages: the tensors of these blocks."""

    blocks: BlockSets


FROM_FOLLOWER: Direction[Wanted] = Direction(Wanted)
ToFollower: TypeAlias = State | Update | Lags

TO_FOLLOWER: Direction[ToFollower] = Direction(*get_args(ToFollower), parts=STEP_RECORD)
