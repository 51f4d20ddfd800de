"""What FakeCluster knows of a worker and of a process group, and what shall go wrong."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from elastic.control.commands import Command, Finish, Form, Recall
from elastic.protocol.membership import Membership


@dataclass(kw_only=True)
class Faults:
    """What shall go wrong; every number is a budget, the seed decides when."""

    kills: int = 0
    kill_chance: float = 0.01
    kill_modes: tuple[str, ...] = ()  # empty: whatever the worker does
    stillborn: int = 0
    stuck: int = 0  # freeze when told to form; noticed after 100 s
    sync_failures: int = 0
    user_failure: float = 0.0
    stop_at: float | None = None
    slots: tuple[tuple[float, int], ...] = ((0.0, 1000),)  # from when on, how many
    eval_every: int = 0
    slow_detection: float = 0.0  # chance
    failing_saves: int = 0
    controller_kills: int = 0
    controller_chance: float = 0.004
    burst: float = 0.0
    """Chance, per turn of the cluster, that a fault has company: within BURST_TURNS of the last."""
    slow_takeover: bool = False
    """Between the introductions to a new controller the others go on, and may die."""
    drains: int = 0
    drain_chance: float = 0.01
    notice_s: tuple[float, ...] = (0.0, 0.2, 3.0, 30.0)
    holder_losses: int = 0


@dataclass(eq=False)
class Worker:
    number: int
    is_alive: bool = True
    is_up: bool = False
    is_stuck: bool = False
    step: int = -1
    state: int = 0
    prepared: int | None = None  # the state that the reduced gradient leads to
    source: "Worker | None" = None
    is_copying: bool = False
    has_complained: bool = False  # sent SyncFailed, has no new source yet
    mode: str = "idle"
    form: Form | None = None
    rank: int = -1
    wants_pause: bool = False
    save_asked: tuple[int, int] = (0, 0)  # generation, step
    save_begun: tuple[int, int] = (0, 0)
    evaluated: int = 0
    doomed_at: float | None = None  # has a drain notice: gone then, if it has not left before
    aborted: int = 0  # generations up to this one are given up
    membership: Membership | None = None  # the newest that it has obeyed a command of
    formed: int = 0  # the newest generation that has formed here
    inbox: deque[Command] = field(default_factory=deque)

    @property
    def wants_save(self) -> bool:
        assert self.form is not None
        generation, step = self.save_asked
        is_mine = generation == self.form.membership.generation
        return is_mine and not (self.save_begun[0] == generation and self.save_begun[1] >= step)

    @property
    def told(self) -> Form | Finish | Recall | None:
        """The newest command that makes it a member, as far as it has not obeyed it."""
        told = [c for c in self.inbox if isinstance(c, Form | Finish | Recall)]
        return told[-1] if told else None

    @property
    def newest_membership(self) -> Membership | None:
        """That it was told of, whether it has obeyed or not."""
        return self.told.membership if self.told else self.membership

    @property
    def kind(self) -> str:
        """What it says to a new controller."""
        is_told, newest = self.told is not None, self.newest_membership
        is_forming = newest is not None and newest.generation > self.formed
        if isinstance(self.told, Finish) or (self.mode == "ended" and not is_told):
            return "ended"
        if self.source is not None and not is_forming:
            return "syncing" if self.is_copying else "synced"
        if self.step < 0 or self.is_copying:
            return "ready"
        is_at_work = self.mode in ("boundary", "evaluate", "compute", "reduce", "vote")
        return "working" if is_at_work and not is_told else "stopped"


@dataclass(eq=False)
class Group:
    """A generation's process group."""

    members: list[Worker]
    arrived: set[int] = field(default_factory=set)
    restored: set[int] = field(default_factory=set)  # ranks that have their part of the state
    contributed: dict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    pause_at: set[int] = field(default_factory=set)
    save_at: set[int] = field(default_factory=set)
    is_broken: bool = False
    saved: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # step -> ranks

    def has_gap(self) -> bool:
        return self.is_broken or any(not w.is_alive for w in self.members)

    def is_complete(self, step: int, what: str) -> bool:
        return len(self.contributed[step, what]) == len(self.members)
