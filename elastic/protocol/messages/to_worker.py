"""What the controller tells a worker, over its link."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastic.protocol.messages.direction import Direction
from elastic.protocol.messages.hello import Leave
from elastic.protocol.messages.to_controller import Evaluation, Stage
from elastic.protocol.step_record import NONE_APPLIED, AppliedRecord, VoteHead

StoreAddress: TypeAlias = tuple[str, int, str]
"""Host, port and secret."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load the state that the run goes on from."""

    place: str
    """The run directory."""
    recorded_step: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Copy the state of another worker and follow it."""

    source: int
    address: tuple[str, int] | None
    """None: the source is gone."""
    members: tuple[tuple[str, int] | None, ...] = ()
    """Of a model in stages: the addresses of those who train, by rank. Empty: nobody does, or each
    member has all of the state."""
    stages: tuple[Stage | None, ...] = ()
    """What each of them has, as they said; empty: they have not."""
    rank: int = 0
    """What this worker is likely to be in the next generation."""
    next_ranks: tuple[int, ...] = ()
    """By rank of the next generation: the rank among `members`, or -1 for a newcomer."""
    next_nodes: tuple[str, ...] = ()
    """By rank of the next generation: the node."""
    next_order: tuple[int, ...] = ()
    """The order that the next generation is likely to have, as `Form.order`."""


@dataclass(frozen=True, slots=True)
class LogTo:
    place: str
    """The run directory."""


@dataclass(frozen=True, slots=True)
class Holders:
    holders: tuple[tuple[str, str, int], ...]
    """Backup servers as node, host and port, the best one for this worker first."""


@dataclass(frozen=True, slots=True)
class SaveConcluded:
    """The checkpoint of this step is published, or will not be."""

    step: int
    is_published: bool


@dataclass(frozen=True, slots=True)
class Word:
    """The controller lives. Said for each heartbeat, and not again: the next one says more."""

    recorded_step: int
    formed: int
    """The newest generation that it knows to have formed."""
    applied: AppliedRecord = NONE_APPLIED


@dataclass(frozen=True, slots=True)
class Form:
    """Join a generation."""

    generation: int
    rank: int
    world_size: int
    step: int
    """Which its members are to stand at."""
    then_pause: bool
    recorded_step: int
    store: StoreAddress | None
    """Of the rendezvous where its members meet; None: there is one member."""
    vote: VoteHead | None
    """Of `step`, its content is the payload: for who has not seen it complete and is to apply it;
    None: not needed."""
    evaluation: Evaluation | None
    """The newest that its members know of."""
    holders: tuple[tuple[str, str, int], ...]
    order: tuple[int, ...] = ()
    """Of each rank its position in the mesh; empty: its rank. Of a model in stages it decides
    between those who have nothing: elastic/protocol/rank_order.py."""
    origin: int = 0
    """The generation that computed `step`: another one's state of it is another state."""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Pause:
    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    generation: int
    rank: int
    world_size: int
    step: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Save the state that all stand at."""

    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Give the generation up."""

    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Give up a generation that this worker may not have heard of."""

    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Write the final state and say its hash."""

    generation: int
    rank: int
    world_size: int
    outcome: str
    log_folder: str | None
    recorded_step: int


Command: TypeAlias = (
    Load | Sync | LogTo | Holders | Form | Pause | Checkpoint | Keep | Abort | Recall | Finish
)
"""What a member obeys."""
OfGeneration: TypeAlias = Form | Pause | Checkpoint | Keep | Abort | Recall | Finish
ToWorker: TypeAlias = Command | SaveConcluded | Word | Leave

TO_WORKER: Direction[ToWorker] = Direction(
    *get_args(ToWorker), parts=(AppliedRecord, Evaluation, Stage, VoteHead)
)
