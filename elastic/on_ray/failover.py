"""Taking over the workers of a controller that died: they introduce themselves, then it goes on.

What follows from where they stand is elastic/control/failover.py's; what the journal says is read
in elastic/controller/decision_log.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, cast

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from elastic.control.detection.hang import Watch, suspects, watch
from elastic.control.detection.patience import Costly
from elastic.control.events import Adopted
from elastic.control.failover import at_work, have_all, with_state
from elastic.control.standing import Standing
from elastic.control.state import Active, Ledger, Limits, Phase
from elastic.on_ray.cluster_view import ClusterView
from elastic.on_ray.naming import end
from elastic.on_ray.slots import Slot
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.pulse import Heartbeat
from elastic.protocol.messages.to_controller import Introduction
from elastic.protocol.timeouts import timeouts_of

log = logging.getLogger(__name__)
PATIENCE_S = 10.0
QUIET_S = 0.3
"""How long nobody else introduces himself before a whole generation at work is enough."""
RETRY_S = 0.5
"""Between two calls of an actor that Ray cannot reach."""
SHOWN = {"working": "training", "synced": "ready", "starting": "pending"}
"""A worker's state in status.json, by the kind of its standing."""


class Failover:
    """The wait for introductions."""

    def __init__(
        self,
        cluster: ClusterView,
        candidates: dict[int, ActorHandle[Any]],
        end: Callable[[ActorHandle[Any]], None] = end,
    ) -> None:
        """candidates: the run's worker actors as Ray knows them, some dead or not yet started."""
        self._cluster, self._candidates, self._end = cluster, candidates, end
        self._newest = max(candidates, default=-1)
        self._standings: dict[int, Standing] = {}
        self._watches: dict[int, Watch] = {}
        """Of whom the pulse only is heard."""
        self._costly: tuple[Costly, ...] = ()
        self._audible_since: float | None = None
        """From when on the pulses of all can have reached us."""
        self._has_news = asyncio.Event()

    def hear(self, worker: int, said: Introduction) -> bool:
        """False if the worker is none of ours."""
        actor = self._candidates.pop(worker, None)
        if actor is None:
            return False
        kind = said.kind
        made: Future[ActorHandle[Any]] = Future()
        made.set_result(actor)
        slot = Slot(made, last_seen=self._cluster.now(), state=SHOWN.get(kind, kind))
        if said.process is not None:
            slot.locate(said.process)
            slot.step = said.step
        standing = Standing(
            worker,
            kind,
            said.generation,
            said.rank,
            said.world_size,
            said.step,
            node=slot.node_id,
            origin=said.origin,
        )
        if self._audible_since is None:
            self._cluster.in_background(self._listen_at(said.controller_before))
        self._cluster.workers[worker] = slot
        self._cluster.holders.on_node(slot.node_id)
        slot.task = self._cluster.in_background(self._watch(worker, actor))
        self._standings[worker] = standing
        self._cluster.send_word(worker)  # its lease begins anew, whatever becomes of us
        self._has_news.set()
        return True

    def hear_pulse(self, worker: int, heartbeat: Heartbeat) -> None:
        """Of a worker that has not introduced itself."""
        if worker in self._candidates:
            now = self._cluster.now()
            self._watches[worker] = watch(self._watches.get(worker), heartbeat, now)

    async def _listen_at(self, address: tuple[str, int]) -> None:
        """Pulses dial where they have heard our predecessor, and only a worker knows where."""
        if await self._cluster.links.open_also(address) and self._audible_since is None:
            self._audible_since = self._cluster.now()

    async def _watch(self, worker: int, actor: ActorHandle[Any]) -> None:
        """Its `run` was called by the controller that died; Ray tells us how it ends all the same.

        What it raised, if it did, its own report tells.
        """
        try:
            await has_returned(actor)
            self._cluster.user_failed(worker, "failed: see its log")
        except RayError:
            self._cluster.lost(worker, "process_died")

    async def collect(self, ledger: Ledger, phase: Phase, limits: Limits) -> Adopted:
        """Everybody's standing; whoever has not said it by then is ended.

        ledger, phase: the journal's. Who holds the state by them, and is not dead as far as Ray
        knows, has as long as its lease: something in it may hold the GIL. Unless others hold all of
        it, too: then it has as long as a member that hangs or cannot be reached.
        """
        detect_s, began = self._cluster.detect_s, time.monotonic()
        step = max(ledger.step, self._cluster.recorded_step)
        self._costly = ledger.losses.costly
        expected = (
            phase.membership.workers if isinstance(phase, Active) else tuple(ledger.with_state)
        )
        watching = [asyncio.ensure_future(self._drop_dead(w)) for w in self._candidates]
        while self._candidates:
            origin = ledger.origin if step == ledger.step else 0
            if have_all(tuple(self._standings.values()), step, expected, limits, origin):
                self._give_up(w for w in expected if w in self._candidates)
            is_missed = any(w in self._candidates for w in expected)
            limit_s = timeouts_of(detect_s).lease_s if is_missed else detect_s or PATIENCE_S
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                break
            is_enough = at_work(with_state(self._standings.values())) is not None
            self._has_news.clear()
            try:
                wait_s = QUIET_S if is_enough else timeouts_of(detect_s).tick_s
                await asyncio.wait_for(self._has_news.wait(), min(wait_s, left_s))
            except TimeoutError:
                if is_enough:
                    break
        for task in watching:
            task.cancel()
        for actor in self._candidates.values():
            self._end(actor)
        self._candidates.clear()
        by_worker = tuple(self._standings[w] for w in sorted(self._standings))
        recorded = self._cluster.recorded_step
        return Adopted(by_worker, self._cluster.now(), self._newest, recorded)

    async def _drop_dead(self, worker: int) -> None:
        """A candidate that Ray knows, or learns, to be dead says nothing."""
        try:
            await has_returned(self._candidates[worker])
        except RayError:
            self._candidates.pop(worker, None)
            self._has_news.set()

    def _give_up(self, missed: Iterable[int]) -> None:
        """Whoever hangs, or is silent for longer than its pulse is if it can be reached."""
        for worker, why in self._gone(frozenset(missed)):
            log.warning('worker=%s reason="%s"', worker_name(worker), why)
            self._end(self._candidates.pop(worker))

    def _gone(self, missed: frozenset[int]) -> Iterator[tuple[int, str]]:
        detect_s, now = self._cluster.detect_s, self._cluster.now()
        if detect_s is None:
            return
        watches = {w: slot.watch for w, slot in self._cluster.workers.items() if slot.watch}
        everyone = {**self._watches, **watches}.values()
        for worker, why in suspects(everyone, now, detect_s, costly=self._costly):
            if worker in missed:
                yield worker, why
        patience_s = detect_s + timeouts_of(detect_s).heartbeat_s
        since = self._audible_since
        if since is not None and now - since > patience_s:
            for worker in sorted(missed - self._watches.keys()):
                yield worker, f"not a word for {now - since:.1f} s, others are heard"


async def has_returned(actor: ActorHandle[Any]) -> None:
    """From `run`, which somebody else has called. Raises RayError if it is dead; that it cannot be
    reached, as with a cut link, does not say so."""
    while True:
        try:
            await cast(Any, actor).is_free.remote()  # waits behind `run`
            return
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_S)
