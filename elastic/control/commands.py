"""What the controller tells its shell to do, in order: plain values, no behaviour.

What happened, and what is known, is in state.py.
"""

from dataclasses import dataclass

from elastic.protocol.membership import Membership


@dataclass(frozen=True, slots=True)
class Spawn:
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Take the state the run starts from: the newest good checkpoint, else the initial one."""

    worker: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Copy the state of `source` and follow it step by step, instead of any earlier source."""

    worker: int
    source: int
    members: tuple[int, ...] = ()
    """Of a model in stages: those who train, by rank; the worker copies its part from several."""
    order: tuple[int, ...] = ()
    rank: int = 0
    world_size: int = 1
    """These three in old journals only."""
    next_order: tuple[int, ...] = ()
    """`Form.order` of the generation that is likely to come next, ..."""
    next_members: tuple[int, ...] = ()
    """... and its workers, by rank; this one is among them."""


@dataclass(frozen=True, slots=True)
class Form:
    membership: Membership
    step: int
    """Every member stands at this many committed steps before it joins."""
    roll_forward: tuple[int, ...] = ()
    """Workers that apply their prepared step first..."""
    vote_of: int | None = None
    """...with the vote of this worker, which has committed it. None: everybody who had is lost,
    but the vote of `step` came with its Committed or Suspended."""
    then_pause: bool = False
    """Pause at the next boundary (newcomers wait there while survivors finish an evaluation)."""
    order: tuple[int, ...] = ()
    """Of each rank its position in the mesh; empty: its rank. Of a model in stages it decides
    between members that have nothing: elastic/protocol/rank_order.py."""
    origin: int = 0
    """The generation that computed `step`."""


@dataclass(frozen=True, slots=True)
class Pause:
    membership: Membership


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Begin a checkpoint of the next boundary, by their vote all of the same one, unless this
    generation has begun one of `step` or later."""

    membership: Membership
    step: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Save the state of the boundary at which all have paused; answer Kept."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Abort:
    """Give the generation up: abandon collectives and sources, answer Suspended."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Recall:
    """A new controller calls everybody together who holds state: whatever generation they think
    they are in, they abandon it, are ranks of this one that never formed, and answer Suspended."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Finish:
    membership: Membership
    outcome: str


@dataclass(frozen=True, slots=True)
class Retire:
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the manifest: all parts of this save are durable."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what this save has written: it will not be whole."""

    generation: int
    step: int


Command = (
    Spawn
    | Load
    | Sync
    | Form
    | Pause
    | Checkpoint
    | Keep
    | Abort
    | Recall
    | Finish
    | Retire
    | Publish
    | Discard
)
