"""Who hangs, and where: every member says where it stands before a suspect is killed.

The rule of suspicion is elastic/control/detection/hang.py's, what a loss means is
elastic/control's.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from elastic.control.detection.desync import stalled, strays
from elastic.control.detection.hang import (
    Cut,
    Watch,
    all_suspects,
    cause_of,
    hear_cut,
    is_dead,
    last_move,
    place_of,
    slow_in,
    suspects,
    where,
)
from elastic.control.detection.partition import disputed, parted
from elastic.control.detection.patience import Costly, PhaseOfStep, forget, lost_at, remember
from elastic.control.events import CollectiveFailed
from elastic.on_ray.cluster_view import ClusterView
from elastic.on_ray.detection.broken_links import is_refused
from elastic.on_ray.detection.unexplained import Unexplained, plain_host
from elastic.protocol.membership import Membership, worker_name
from elastic.protocol.messages.pulse import Question, ReachAsked, Reached, Stacks, StacksAsked
from elastic.protocol.messages.to_controller import CollectiveFailed as FailureReport
from elastic.protocol.messages.to_controller import Diverged, Report
from elastic.protocol.timeouts import timeouts_of

log = logging.getLogger(__name__)
UNEXPLAINED = 3
"""A failure without a loss after this part of `detect_s` may be a cut path's."""
MANY = 64
"""Hosts that all members dial at once, at most."""
FRESH = 4
"""Whose pulse was heard within so many of its heartbeats is waited for."""


@dataclass(frozen=True)
class Suspect:
    """Who must go."""

    cause: str
    why: str
    slow_in: PhaseOfStep | None = None


class Diagnosis:
    """One at a time, from suspicion to the loss; it takes `Timeouts.diagnosis_s` at most."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._is_under_way = False
        self._stalled = 0
        """The newest generation that was given up because all of it waits."""
        self._asked: dict[int, float] = {}
        self._cut: Cut | None = None
        self._unexplained = Unexplained()
        self._dials_at = 0.0
        """The earliest time for the next dial."""
        self._dialled: set[int] = set()
        """Whose own process is being dialled."""
        self._awaited: set[int] = set()
        self._unasked: set[int] = set()
        """Whose pulse was heard lately, but had no connection when all were asked."""
        self._question: Question | None = None
        """What was asked last."""
        self._stacks: dict[int, str] = {}
        self._reached: dict[int, frozenset[str]] = {}
        self._ended: tuple[Costly, ...] = ()
        """Who may be slow and was ended: the ledger learns of it later than the next look."""
        self._told: set[tuple[int, PhaseOfStep]] = set()
        """Of whose slowness in a costly place it was told."""
        self._has_all = asyncio.Event()

    def look(self) -> None:
        """Heartbeats become events only when they make a worker suspect."""
        cluster = self._cluster
        if self._is_under_way or cluster.detect_s is None:
            return
        watches = {w: r.watch for w, r in cluster.workers.items() if r.watch is not None}
        now, detect_s = cluster.now(), cluster.detect_s
        self._cut = hear_cut(self._cut, watches.values(), now, detect_s)
        self._dial_silent(watches, now, detect_s)
        late = self._late(watches, now, detect_s)
        if late:
            generations = {watches[w].heartbeat.generation for w in late}
            members = {n: w for n, w in watches.items() if w.heartbeat.generation in generations}
            limit_s = timeouts_of(cluster.detect_s).diagnosis_s
            self._is_under_way = True
            cluster.in_background(self._conclude(late, members, limit_s))
            return
        members, ends = self._disputed(watches, now, detect_s)
        if ends:
            self._is_under_way, self._dials_at = True, now + detect_s
            cluster.in_background(self._conclude_dispute(members, ends))
            return
        for generation, why in stalled(watches.values(), cluster.now(), cluster.detect_s):
            if generation > self._stalled and not self._is_under_way:
                self._stalled, self._is_under_way = generation, True
                of_it = {n: w for n, w in watches.items() if w.heartbeat.generation == generation}
                cluster.in_background(self._conclude_stall(generation, why, of_it))

    def _late(self, watches: dict[int, Watch], now: float, detect_s: float) -> dict[int, "Suspect"]:
        """Who must go."""
        found = {w: Suspect("hung", why) for w, why in strays(watches.values(), detect_s)}
        newest = max((w.heartbeat.step for w in watches.values()), default=0)
        self._ended = forget(self._ended, newest - 1)
        costly = (*self._cluster.host.costly(), *self._ended)
        for w, why in suspects(watches.values(), now, detect_s, self._asked, self._cut, costly):
            cause = cause_of(watches[w], now, detect_s)
            found[w] = Suspect(cause, why, slow_in(watches[w], now, detect_s))
        if costly:
            everyone = tuple(watches.values())
            for w, why in all_suspects(everyone, now, detect_s, self._asked, self._cut, ()):
                self._tell_of_patience(watches[w], why, costly)
        return found

    def _tell_of_patience(self, watched: Watch, why: str, costly: tuple[Costly, ...]) -> None:
        """Once, of a worker that would be suspect elsewhere."""
        worker, place = watched.heartbeat.worker, where(watched.heartbeat)
        lost = [worker_name(w) for w in lost_at(costly, place)]
        if not lost or (worker, place) in self._told:
            return
        self._told.add((worker, place))
        patience_s = timeouts_of(self._cluster.detect_s).cold_s
        slow = f"{place} took the life of {' '.join(lost)}, {worker_name(worker)} has "
        slow += f"{patience_s:g} s: {why}"
        log.warning('step=%d slow="%s"', place.step, slow)
        said = {"worker": worker_name(worker), "lost": lost, "patience_s": patience_s}
        slow = {"step": place.step, "phase": place.phase, **said, "why": why}
        self._cluster.host.record.note("slow", slow)

    def _dial_silent(self, watches: dict[int, Watch], now: float, detect_s: float) -> None:
        """While others are heard. Who died during a cut of our own link is spared as if it were cut
        off still, and Ray's word of it comes by TCP's backoff, too: a dial tells at once."""
        heard_at = max((w.heard_at for w in watches.values()), default=0.0)
        silent = [n for n, w in watches.items() if now - w.heard_at > detect_s]
        if now - heard_at < detect_s / 2:
            for worker in sorted(set(silent) - self._dialled)[: MANY - len(self._dialled)]:
                address = self._cluster.workers[worker].peer_address
                if address is not None:
                    self._dialled.add(worker)
                    self._cluster.in_background(self._dial(worker, address))

    async def _dial(self, worker: int, address: tuple[str, int]) -> None:
        try:
            if await is_refused(address, timeouts_of(self._cluster.detect_s).diagnosis_s):
                why = "its pulse is silent, and nobody listens at its address"
                self._cluster.lost(worker, "process_died", why)
        finally:
            self._dialled.discard(worker)

    def _disputed(
        self, watches: dict[int, Watch], now: float, detect_s: float
    ) -> tuple[dict[int, Watch], set[str]]:
        """Members of a generation, and hosts among theirs that some may not reach; or nothing."""
        if now < self._dials_at:
            return {}, set()
        hosts = self._hosts(watches)
        for generation, ends in disputed(watches.values(), hosts, now, detect_s).items():
            return {n: w for n, w in watches.items() if w.heartbeat.generation == generation}, ends
        membership = self._unexplained.take(now, detect_s / UNEXPLAINED)
        if membership is None:
            return {}, set()
        members = {w: watches[w] for w in membership.workers if w in watches}
        ends = {hosts[w] for w in members}
        is_explained = len(members) < membership.world_size  # one of them is lost
        return (members, set()) if is_explained or not 1 < len(ends) <= MANY else (members, ends)

    def _hosts(self, workers: Iterable[int]) -> dict[int, str]:
        """As connections name them; who is lost by now has none."""
        slots = self._cluster.workers
        return {w: plain_host(slots[w].node_ip) for w in workers if w in slots}

    def hear_beat(self, worker: int) -> None:
        """A worker that its pulse says is dead is lost: its connection ends later, once its memory
        is freed. A pulse that had no connection when all were asked is asked now."""
        slot, question = self._cluster.workers.get(worker), self._question
        if slot is not None and slot.watch is not None and is_dead(slot.watch):
            self._cluster.lost(worker, "process_died")
            return
        if question is None or not self._is_under_way or worker not in self._unasked:
            return
        if self._cluster.links.ask_pulse(worker, question):
            self._unasked.discard(worker)

    def hear(self, worker: int, answer: Stacks | Reached) -> None:
        """A pulse has answered."""
        match answer, self._question:
            case Stacks(payload), StacksAsked():
                self._stacks[worker] = payload.decode(errors="replace")
            case Reached(hosts), ReachAsked():
                self._reached[worker] = frozenset(hosts)
            case _:
                return  # the question before was given up
        self._awaited.discard(worker)
        if not self._awaited:
            self._has_all.set()

    def expect_answers(self, membership: Membership) -> None:
        """Its members have just been asked to give their generation up."""
        now = self._cluster.now()
        self._asked = dict.fromkeys(membership.workers, now)
        self._unexplained.begin(membership, now)

    def hear_answer(self, worker: int) -> None:
        self._asked.pop(worker, None)

    def hear_report(self, worker: int, report: Report) -> None:
        if isinstance(report, FailureReport) and report.unanswered:
            self._unexplained.hear_unanswered(worker, report.generation, report.unanswered)

    def hear_diverged(self, report: Diverged) -> None:
        """All members have found out together, and the first to say so is believed."""
        for worker in report.workers:
            self._cluster.lost(worker, "diverged", report.message)

    async def _conclude(
        self, late: dict[int, "Suspect"], members: dict[int, Watch], limit_s: float
    ) -> None:
        """The suspects are lost, once it is on record where everybody stood."""
        said = "; ".join(f"suspect {worker_name(w)}: {s.why}" for w, s in late.items())
        cluster = self._cluster
        for worker, suspect in late.items():
            if (slot := cluster.workers.get(worker)) is not None:
                slot.accuse(suspect.cause, suspect.why + cluster.host.stage_of(worker))
        is_saved = await self._save(said, members, limit_s)
        for worker, suspect in late.items():
            watched = members[worker]
            is_silent = suspect.cause == "heartbeat_silent"
            last_seen = watched.heard_at if is_silent else last_move(watched)
            place = place_of_stacks(watched.heartbeat.generation) if is_saved else ""
            if suspect.slow_in is not None:
                self._ended = remember(self._ended, suspect.slow_in, worker)
            why = suspect.why + cluster.host.stage_of(worker) + place
            cluster.lost(worker, suspect.cause, why, last_seen, suspect.slow_in)

    async def _conclude_dispute(self, members: dict[int, Watch], ends: set[str]) -> None:
        """Everybody dials the hosts at the ends; who is cut off is lost."""
        cluster, hosts = self._cluster, self._hosts(members)
        generation = max(watched.heartbeat.generation for watched in members.values())
        again = self._unexplained.unanswered_again(generation, cluster.recorded_step, hosts)
        located = {hosts[w]: cluster.workers[w].peer_address for w in hosts if hosts[w] in ends}
        addresses = tuple((host, address) for host, address in located.items() if address)
        limit_s = timeouts_of(cluster.detect_s).diagnosis_s
        try:
            await self._ask(members, limit_s, ReachAsked(0.8 * limit_s, addresses))
            found = self._reached
        finally:
            self._is_under_way = False
        hosts = self._hosts(members)  # without whom was lost meanwhile
        unreached = {w: ends - found[w] | again.get(w, set()) for w in found if w in hosts}
        heard = {hosts[w] for w in unreached}  # else it is silent for us, too
        hosts = {w: host for w, host in hosts.items() if host in heard}
        newcomers = {w for w in members if not members[w].heartbeat.own.steps}
        cut_off = parted(hosts, unreached, newcomers)
        gone = {w: Suspect("unreachable", why) for w, why in cut_off}
        if self._is_under_way:
            return
        if gone:
            self._is_under_way = True
            await self._conclude(gone, members, limit_s)
        elif len(found) == len(members) and not any(unreached.values()):
            await self._renew_connections(members)

    async def _renew_connections(self, members: dict[int, Watch]) -> None:
        """A path was cut for a while: new connections get through at once, but those of the
        generation try again ever more seldom (RFC 6298: after twice as long each time)."""
        cluster = self._cluster
        watches = {n: w for n in members if (w := cluster.workers[n].watch) is not None}
        assert cluster.detect_s is not None
        stale = disputed(watches.values(), self._hosts(watches), cluster.now(), cluster.detect_s)
        for generation, ends in stale.items():
            if generation > self._stalled:
                self._stalled, self._is_under_way = generation, True
                why = f"connections between {' and '.join(sorted(ends))} are not answered, though "
                why += "new ones are: their path was cut for a while, and they are made anew"
                await self._conclude_stall(generation, why, watches)

    async def _conclude_stall(self, generation: int, why: str, members: dict[int, Watch]) -> None:
        """Nobody is lost: the generation is."""
        cluster = self._cluster
        is_saved = await self._save(why, members, timeouts_of(cluster.detect_s).diagnosis_s)
        why += place_of_stacks(generation) if is_saved else ""
        cluster.say(CollectiveFailed(generation, 0, why, cluster.now(), is_stall=True))

    async def _save(self, said: str, members: dict[int, Watch], limit_s: float) -> bool:
        """Where everybody stands goes among the logs; False if there are none."""
        deadline, answer_s = time.monotonic() + limit_s, 0.8 * limit_s
        try:
            await self._ask(members, answer_s, StacksAsked(0.8 * answer_s))
            saving = self._cluster.host.record.keep_stacks(self._texts(said, members, answer_s))
            if saving is not None:
                left_s = max(0.0, deadline - time.monotonic())
                await asyncio.wait([asyncio.wrap_future(saving)], timeout=left_s)
        finally:
            self._is_under_way = False
        return saving is not None

    async def _ask(self, members: dict[int, Watch], limit_s: float, question: Question) -> None:
        """Have every member's pulse answer. Whose is silent already is not waited for."""
        cluster, now = self._cluster, self._cluster.now()
        fresh_s = FRESH * timeouts_of(cluster.detect_s).heartbeat_s
        self._question, self._has_all = question, asyncio.Event()
        self._stacks, self._reached = {}, {}
        asked = {w for w in members if cluster.links.ask_pulse(w, question)}
        self._awaited = {w for w in members if now - members[w].heard_at < fresh_s}
        self._unasked = self._awaited - asked
        if self._awaited:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_all.wait(), limit_s)

    def _texts(self, said: str, members: dict[int, Watch], answer_s: float) -> dict[str, str]:
        """Files by name, one of each member: what is wrong, where this one is, its stacks."""
        now, at = self._cluster.now(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        texts: dict[str, str] = {}
        for worker, watched in members.items():
            beat = watched.heartbeat
            stands = f"{beat.phase_s + now - watched.heard_at:.1f} s {place_of(beat)}"
            stacks = self._stacks.get(worker) or self._silence(worker, watched, now, answer_s)
            texts[file_name(beat.generation, worker_name(worker))] = (
                f"# {at} {said}\n"
                f"# this is {worker_name(worker)}: {stands}, process state {beat.process_state}\n"
                f"{stacks}\n"
            )
        return texts

    def _silence(self, worker: int, watched: Watch, now: float, answer_s: float) -> str:
        """Why there are no stacks of a member."""
        slot = self._cluster.workers.get(worker)
        newest = watched if slot is None or slot.watch is None else slot.watch
        if worker in self._unasked:
            why = "has no connection"
        elif worker in self._awaited:
            why = f"has not answered in {answer_s:g} s"
        else:
            why = "is silent"
        return f"its pulse {why}, last heard {now - newest.heard_at:.1f} s ago"


def place_of_stacks(generation: int) -> str:
    return f"; stacks in logs/{file_name(generation, '*')}"


def file_name(generation: int, worker: str) -> str:
    return f"stacks-g{generation}-{worker}.txt"
