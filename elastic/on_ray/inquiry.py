"""Who hangs, and where: every member says where it stands before a suspect is killed.

The rule of suspicion is elastic/control/suspicion.py's, what a loss means is elastic/control's.
"""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elastic.control.state import CollectiveFailed
from elastic.control.straying import stalled, strays
from elastic.control.suspicion import Cut, Watch, hear_cut, last_move, place_of, suspects
from elastic.protocol.membership import Membership, worker_name
from elastic.protocol.waits import waits_of

if TYPE_CHECKING:
    from elastic.on_ray.cluster import RayCluster
    from elastic.on_ray.slots import Slot

FRESH = 4
"""Whose pulse was heard within so many limits of this inquiry is waited for."""


class Inquiry:
    """One at a time, from suspicion to the loss; it takes `Waits.inquiry_s` at most."""

    def __init__(self, cluster: "RayCluster") -> None:
        self._cluster = cluster
        self._is_under_way = False
        self._stalled = 0
        """The newest generation that was given up because all of it waits."""
        self._asked: dict[int, float] = {}
        self._cut: Cut | None = None
        self._awaited: set[int] = set()
        self._found: dict[int, str] = {}
        self._has_all = asyncio.Event()

    def look(self) -> None:
        """Heartbeats become events only when they make a worker suspect."""
        cluster = self._cluster
        if self._is_under_way or cluster.detect_s is None:
            return
        watches = {w: r.watch for w, r in cluster.workers.items() if r.watch is not None}
        now, detect_s = cluster.now(), cluster.detect_s
        self._cut = hear_cut(self._cut, watches.values(), now, detect_s)
        late = dict(strays(watches.values(), detect_s))
        late |= dict(suspects(watches.values(), now, detect_s, self._asked, self._cut))
        if late:
            generations = {watches[w].heartbeat.generation for w in late}
            members = {n: w for n, w in watches.items() if w.heartbeat.generation in generations}
            limit_s = waits_of(cluster.detect_s).inquiry_s
            self._is_under_way = True
            cluster.in_background(self._conclude(late, members, limit_s))
            return
        for generation, why in stalled(watches.values(), cluster.now(), cluster.detect_s):
            if generation > self._stalled and not self._is_under_way:
                self._stalled, self._is_under_way = generation, True
                of_it = {n: w for n, w in watches.items() if w.heartbeat.generation == generation}
                cluster.in_background(self._conclude_stall(generation, why, of_it))

    def hear(self, worker: int, _record: "Slot", _header: Any, payload: bytes) -> None:
        """A pulse has answered."""
        self._found[worker] = payload.decode(errors="replace")
        self._awaited.discard(worker)
        if not self._awaited:
            self._has_all.set()

    def expect_answers(self, membership: Membership) -> None:
        """Its members have just been asked to give their generation up."""
        self._asked = dict.fromkeys(membership.workers, self._cluster.now())

    def hear_answer(self, worker: int) -> None:
        self._asked.pop(worker, None)

    def hear_diverged(self, _worker: int, _record: "Slot", header: Any, _payload: bytes) -> None:
        """All members have found out together, and the first to say so is believed."""
        for worker in header["workers"]:
            self._cluster.lost(worker, "diverged", header["message"])

    async def _conclude(
        self, late: dict[int, str], members: dict[int, Watch], limit_s: float
    ) -> None:
        """The suspects are lost, once it is on record where everybody stood."""
        said = "; ".join(f"suspect {worker_name(w)}: {why}" for w, why in late.items())
        is_saved = await self._save(said, members, limit_s)
        for worker, why in late.items():
            watched, is_silent = members[worker], "no heartbeat" in why
            cause = "heartbeat_silent" if is_silent else "hung"
            last_seen = watched.heard_at if is_silent else last_move(watched)
            place = place_of_stacks(watched.heartbeat.generation) if is_saved else ""
            self._cluster.lost(worker, cause, why + place, last_seen)

    async def _conclude_stall(self, generation: int, why: str, members: dict[int, Watch]) -> None:
        """Nobody is lost: the generation is."""
        cluster = self._cluster
        is_saved = await self._save(why, members, waits_of(cluster.detect_s).inquiry_s)
        why += place_of_stacks(generation) if is_saved else ""
        cluster.say(CollectiveFailed(generation, 0, why, cluster.now(), is_stall=True))

    async def _save(self, said: str, members: dict[int, Watch], limit_s: float) -> bool:
        """Where everybody stands goes among the logs; False if there are none."""
        deadline = time.monotonic() + limit_s
        try:
            await self._ask(members, 0.8 * limit_s)
            saving = self._cluster.host.on_stacks(self._texts(said, members))
            if saving is not None:
                left_s = max(0.0, deadline - time.monotonic())
                await asyncio.wait([asyncio.wrap_future(saving)], timeout=left_s)
        finally:
            self._is_under_way = False
        return saving is not None

    async def _ask(self, members: dict[int, Watch], limit_s: float) -> None:
        """Have every member's stacks taken. Whose pulse is silent already is not waited for."""
        cluster, question = self._cluster, {"type": "stacks", "timeout_s": 0.8 * limit_s}
        self._found, self._has_all = {}, asyncio.Event()
        asked = {w for w in members if cluster.links.ask_pulse(w, question)}
        now = cluster.now()
        self._awaited = {w for w in asked if now - members[w].heard_at < FRESH * limit_s}
        if self._awaited:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_all.wait(), limit_s)

    def _texts(self, said: str, members: dict[int, Watch]) -> dict[str, str]:
        """Files by name, one of each member: what is wrong, where this one is, its stacks."""
        now, at = self._cluster.now(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        texts: dict[str, str] = {}
        for worker, watched in members.items():
            beat, silent_s = watched.heartbeat, now - watched.heard_at
            stands = f"{beat.phase_s + silent_s:.1f} s {place_of(beat)}"
            silence = f"its pulse is silent, last heard {silent_s:.1f} s ago"
            texts[file_name(beat.generation, worker_name(worker))] = (
                f"# {at} {said}\n"
                f"# this is {worker_name(worker)}: {stands}, process state {beat.process_state}\n"
                f"{self._found.get(worker, silence)}\n"
            )
        return texts


def place_of_stacks(generation: int) -> str:
    return f"; stacks in logs/{file_name(generation, '*')}"


def file_name(generation: int, worker: str) -> str:
    return f"stacks-g{generation}-{worker}.txt"
