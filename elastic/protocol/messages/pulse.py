"""Between a worker's pulse, a process beside it, and the controller. Standard library only."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastic.protocol.messages.direction import Direction

KILLED = "X"
"""The state of a process that a signal has ended, also while its memory is still being freed."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """What a rank does of its steps while it waits for no peer: its data and its computation."""

    steps: int = 0
    """That it has done so far."""
    seconds: float = 0.0
    """Per micro-batch, the median of the last steps."""
    data_s: float = 0.0
    """Those of them that it waited for its data: its loader is late, its computation is not."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    worker: int
    generation: int
    step: int
    phase: str
    """What the worker is doing, one of workers.health.vitals.PHASES."""
    phase_s: float
    """Seconds in it."""
    p95_s: float | None
    """The worker's own 95th percentile there; None: not known, or code that has no usual time."""
    waits_for_peers: bool
    process_state: str
    """The letter in /proc/<pid>/stat, or KILLED; the heartbeat's sender is another process."""
    collective: tuple[int, str, int] = (0, "", 0)
    """Which of its generation's it waited for last: number, name, elements."""
    own: OwnPart = OwnPart()
    is_new_there: bool = False
    """It has been through this phase a few times only, of which `p95_s` is."""
    part: str = ""
    """Of the generation's group, whose `collective` it is; empty: the whole."""
    unanswered: tuple[tuple[str, float], ...] = ()
    """Hosts that have not answered it, and for how many seconds; looked at while it waits."""
    stopped_s: float = 0.0
    """For so long the pulse has seen its process stopped, whoever was told."""
    memory: tuple[int, int] | None = None
    """Bytes that it holds, and that it can still get."""


@dataclass(frozen=True, slots=True)
class StacksAsked:
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ReachAsked:
    """Which of these hosts can be reached from the worker's?"""

    timeout_s: float
    addresses: tuple[tuple[str, tuple[str, int]], ...]
    """Host, and where somebody listens there."""


@dataclass(frozen=True, slots=True)
class Stacks:
    payload: bytes = b""
    """Where the worker's threads are, as text."""


@dataclass(frozen=True, slots=True)
class Reached:
    hosts: tuple[str, ...]


Question: TypeAlias = StacksAsked | ReachAsked
Said: TypeAlias = Heartbeat | Stacks | Reached

TO_PULSE: Direction[Question] = Direction(*get_args(Question))
FROM_PULSE: Direction[Said] = Direction(*get_args(Said), parts=(OwnPart,))
