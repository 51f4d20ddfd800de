"""Who has stopped making progress: the rule over heartbeats, as docs/faults.md tells it.

Pure functions of values; hearing heartbeats and killing suspects happens in elastic/on_ray.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from elastic.control.detection.patience import Costly, PhaseOfStep, lost_at
from elastic.protocol.messages.pulse import KILLED, Heartbeat

Key = TypeVar("Key")

PATIENCE = 5
"""A phase may take so many times its own 95th percentile."""
LONG_SILENCE = 2
"""Times `detect_s`; so much silence needs no history of the phase: the pulse is a process of its
own, which neither a compilation nor a held GIL stops."""
PATIENCE_UNKNOWN = 100
"""Without a percentile (first step, compilation, user code): so many times `detect_s`."""
PATIENCE_WHEN_NEW = 10
"""With one of a few times only: at least so many times `detect_s`."""
PATIENCE_WITH_ALL = 10
"""Without a word from any member the link in between may be cut, and without them nothing can go
on: so many times `detect_s`, as long as they wait for us (their lease)."""
STOPPED = "T"  # SIGSTOP; "t" is a debugger that looks at the process for a moment
DEAD = ("Z", KILLED)
RESTORING = "restore"
"""The phase that a worker enters again with each piece of its state."""
RESTING = ("pool", "done")
"""Where a member is between generations, at a pause, and behind the end of its loop. All of its
generation get there together, so that whoever is on its way yet is waited for..."""
UNHURRIED = (*RESTING, RESTORING, "save", "starting")
"""...but for those who rest as well, and for those whose work has a limit of its own."""


@dataclass(frozen=True, slots=True)
class Watch:
    """A worker's last heartbeat, when it was heard, and since when it says "stopped"."""

    heartbeat: Heartbeat
    heard_at: float
    stopped_since: float | None = None
    stuck_since: float | None = None
    """Since when it says that it waits in the same collective."""
    moved_at: float | None = None
    """When it was last seen to run, if it says "stopped"; None: never."""


def watch(before: Watch | None, heartbeat: Heartbeat, now: float) -> Watch:
    """Hear the next heartbeat of a worker."""
    stuck_since = now if heartbeat.waits_for_peers else None
    if before and stuck_since is not None and place_in(before.heartbeat) == place_in(heartbeat):
        stuck_since = before.stuck_since or now
    if heartbeat.process_state != STOPPED:
        return Watch(heartbeat, now, stuck_since=stuck_since)
    if before is None:
        return Watch(heartbeat, now, now - heartbeat.stopped_s, stuck_since)
    if before.stopped_since is None:
        return Watch(heartbeat, now, now - heartbeat.stopped_s, stuck_since, before.heard_at)
    return Watch(heartbeat, now, before.stopped_since, stuck_since, before.moved_at)


def place_in(heartbeat: Heartbeat) -> tuple[object, ...]:
    """The collective that it waits in, among all of the run."""
    return heartbeat.generation, heartbeat.step, heartbeat.part, heartbeat.collective


def last_move(watched: Watch) -> float:
    """The last sign of life of a hung worker's trainer, whose pulse goes on beating: it was not
    stopped yet, or it entered its phase."""
    entered_at = watched.heard_at - watched.heartbeat.phase_s
    if watched.stopped_since is None:
        return entered_at
    return watched.stopped_since if watched.moved_at is None else max(watched.moved_at, entered_at)


def where(heartbeat: Heartbeat) -> PhaseOfStep:
    return PhaseOfStep(heartbeat.step, heartbeat.phase)


def is_dead(watched: Watch) -> bool:
    return watched.heartbeat.process_state in DEAD


def absence(watched: Watch, now: float, detect_s: float) -> str | None:
    """Why the worker is gone, however long its phase may take; or None."""
    heartbeat, silent_s = watched.heartbeat, now - watched.heard_at
    if is_dead(watched):
        return f"its process is dead (state {heartbeat.process_state})"
    if watched.stopped_since is not None and now - watched.stopped_since > detect_s:
        stopped_s = now - watched.stopped_since
        return f"its process has been stopped for {stopped_s:.1f} s, {place_of(heartbeat)}"
    if silent_s > LONG_SILENCE * detect_s:
        return f"no heartbeat for {silent_s:.1f} s"  # the pulse beats whatever its worker does
    return None


def cause_of(watched: Watch, now: float, detect_s: float) -> str:
    """Of a suspect's loss, one of elastic.protocol.reports.CAUSES."""
    stopped_s = 0.0 if watched.stopped_since is None else now - watched.stopped_since
    is_known = is_dead(watched) or stopped_s > detect_s
    return "heartbeat_silent" if now - watched.heard_at > detect_s and not is_known else "hung"


def slow_in(watched: Watch, now: float, detect_s: float) -> PhaseOfStep | None:
    """Where a suspect may be slow and no more; None if it is gone, stopped or silent."""
    if watched.stopped_since is not None or now - watched.heard_at > detect_s:
        return None
    return where(watched.heartbeat) if absence(watched, now, detect_s) is None else None


def suspicion(
    watched: Watch,
    awaited_s: float | None,
    now: float,
    detect_s: float | None,
    costly: tuple[Costly, ...] = (),
) -> str | None:
    """Why the worker must be taken for hung, or None.

    `awaited_s`: how long a peer has waited for it; None: nobody does. `detect_s` None: off.
    costly: there its usual time says nothing.
    """
    if detect_s is None:
        return None
    heartbeat, silent_s = watched.heartbeat, now - watched.heard_at
    if gone := absence(watched, now, detect_s):
        return gone
    if silent_s > detect_s:
        why = f"no heartbeat for {silent_s:.1f} s"
    elif awaited_s is not None and awaited_s > detect_s:
        why = f"others have waited for it for {awaited_s:.1f} s"
    elif heartbeat.phase == RESTORING:
        why = "it does not get on with its state"  # nobody waits where all read from one storage
    elif heartbeat.generation == 0 and heartbeat.phase != "pool":
        why = "it has not started"  # it occupies a place, and nobody else would ever notice
    else:
        return None
    phase_s = heartbeat.phase_s + silent_s
    usual = heartbeat.p95_s
    patience_s = PATIENCE_UNKNOWN * detect_s if usual is None else PATIENCE * usual
    least = PATIENCE_WHEN_NEW if heartbeat.is_new_there else 1
    if lost_at(costly, where(heartbeat)):
        least = PATIENCE_UNKNOWN
    patience_s = max(patience_s, least * detect_s)  # it went on since: slow in all, but it moves
    if phase_s <= patience_s:
        return None
    norm = "no usual time known" if usual is None else f"usually under {usual:.2f} s"
    return f"{why}; {phase_s:.1f} s {place_of(heartbeat)} ({norm})"


def place_of(heartbeat: Heartbeat) -> str:
    """Phase and step, for a person, who counts steps from 1."""
    return f"in {where(heartbeat)}"


def suspects(
    watches: Iterable[Watch],
    now: float,
    detect_s: float | None,
    asked: Mapping[int, float] = MappingProxyType({}),
    cut: "Cut | None" = None,
    costly: tuple[Costly, ...] = (),
) -> Iterator[tuple[int, str]]:
    """Every worker that must be taken for hung, and why; but of those who may be slow in the same
    place only one, and the others find it costly.

    asked: since when workers have been asked to give their generation up, without an answer.
    cut: the last one that `hear_cut` found. costly: see `suspicion`.
    """
    watches = tuple(watches)
    if detect_s is None:
        return
    by_worker = {w.heartbeat.worker: w for w in watches}
    named: set[PhaseOfStep] = set()
    for worker, why in all_suspects(watches, now, detect_s, asked, cut, costly):
        place = slow_in(by_worker[worker], now, detect_s)
        if place is None or place not in named:
            yield worker, why
        if place is not None:
            named.add(place)


def all_suspects(
    watches: tuple[Watch, ...],
    now: float,
    detect_s: float,
    asked: Mapping[int, float],
    cut: "Cut | None",
    costly: tuple[Costly, ...],
) -> Iterator[tuple[int, str]]:
    """See `suspects`. Linear but for sorting by step.

    Those of a generation who wait in a later step wait for a worker, and unless it waits itself, so
    do those in its own step, and those at rest who are as far. Who has done a step is not what
    others wait for in it: those wait for a third one, in a vote that some passed.
    """
    cut = hear_cut(cut, watches, now, detect_s)
    rests = resting(watches)
    everyone = sorted(watches, key=lambda w: w.heartbeat.step, reverse=True)
    waits_in: dict[tuple[int, int], float] = {}  # generation, step -> longest wait of any member
    waits_ahead: dict[int, float] = {}  # generation -> ... at a higher step than the one looked at
    for w in everyone:
        if w.heartbeat.waits_for_peers:
            lengthen(waits_in, (w.heartbeat.generation, w.heartbeat.step), w)
    pending: list[Watch] = []
    for w in everyone:
        if pending and pending[0].heartbeat.step > w.heartbeat.step:
            for ahead in pending:
                lengthen(waits_ahead, ahead.heartbeat.generation, ahead)
            pending = []
        heartbeat = w.heartbeat
        here_s = waits_in.get((heartbeat.generation, heartbeat.step))
        timeouts = (
            waits_ahead.get(heartbeat.generation),
            None if heartbeat.waits_for_peers else here_s,
            rested(rests, heartbeat),
            now - asked[heartbeat.worker] if heartbeat.worker in asked else None,
        )
        awaited_s = max((wait for wait in timeouts if wait is not None), default=None)
        why = suspicion(w, awaited_s, now, detect_s, costly)
        if why is not None and not (cut and cut.spares(w, now)):
            yield heartbeat.worker, why
        if heartbeat.waits_for_peers:
            pending.append(w)


def resting(watches: Iterable[Watch]) -> dict[int, tuple[int, float]]:
    """Per generation, the step at which members rest, and the longest rest there."""
    found: dict[int, tuple[int, float]] = {}
    for w in watches:
        heartbeat = w.heartbeat
        if heartbeat.generation and heartbeat.phase in RESTING:
            here = heartbeat.step, heartbeat.phase_s
            found[heartbeat.generation] = max(found.get(heartbeat.generation, here), here)
    return found


def rested(rests: Mapping[int, tuple[int, float]], heartbeat: Heartbeat) -> float | None:
    """How long those at rest have waited for it; None: it is not on its way to them."""
    step, rest_s = rests.get(heartbeat.generation, (-1, 0.0))
    is_on_its_way = not heartbeat.waits_for_peers and heartbeat.phase not in UNHURRIED
    return rest_s if is_on_its_way and heartbeat.step <= step else None


@dataclass(frozen=True, slots=True)
class Cut:
    """All members of the newest generation were silent at once: it may be our own link, and nobody
    is suspect who has been silent since, member or not."""

    begun_at: float
    """When even the last one had been silent for half of `detect_s`: three heartbeats, and before
    the first one is suspect."""
    last_at: float
    """When they still were."""
    length_s: float

    def spares(self, watched: Watch, now: float) -> bool:
        """Connections come back one by one: by the backoff of TCP (RFC 6298) the last one sends
        again after as long again as it was silent."""
        return watched.heard_at < self.begun_at and now < self.last_at + self.length_s


def hear_cut(
    before: Cut | None, watches: Iterable[Watch], now: float, detect_s: float | None
) -> Cut | None:
    """The cut that lasts, else the last one, unless it has lasted too long."""
    watches = tuple(watches)
    newest = max((w.heartbeat.generation for w in watches), default=0)
    if detect_s is None or not newest:
        return before
    last = max(w.heard_at for w in watches if w.heartbeat.generation == newest)
    silent_s = now - last
    if silent_s <= detect_s / 2:
        return before
    is_bearable = silent_s < PATIENCE_WITH_ALL * detect_s
    return Cut(last + detect_s / 2, now, silent_s) if is_bearable else None


def lengthen(timeouts: dict[Key, float], key: Key, peer: Watch) -> None:
    """A silent peer's wait is not counted on: it may have ended."""
    timeouts[key] = max(timeouts.get(key, 0.0), peer.heartbeat.phase_s)
