"""The run inside the controller's process: cluster, decisions, record and status put together.

`supervise` is hosted by the controller actor. The decisions are elastic/control's, the hands are
elastic/on_ray/cluster.py's, what goes on record is elastic/controller/recorder.py's.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elastic.config import RunConfig
from elastic.control import events as e
from elastic.control import state as s
from elastic.control.detection.patience import Costly
from elastic.control.resizing import in_force
from elastic.control.state import Decision
from elastic.control.transition import start
from elastic.controller import loop
from elastic.controller.publisher import Publisher
from elastic.controller.recorder import Recorder
from elastic.controller.roll_call import RollCall
from elastic.controller.settings import limits_of, worker_spec
from elastic.controller.status import (
    meters_of,
    result_of,
    stage_text,
    stages_of,
    status_of,
    what_is_lost,
)
from elastic.controller.stragglers import Stragglers
from elastic.on_ray import actors, naming
from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.failover import Failover
from elastic.on_ray.feed.start import end_feed
from elastic.on_ray.head_calls import HeadCalls
from elastic.on_ray.meters import Meters
from elastic.on_ray.placement.drain import watch_drains
from elastic.on_ray.placement.waiting import (
    LOOK_EVERY_S,
    start_line,
    watch_waiting,
)
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.to_controller import (
    Fingerprint,
    OfScript,
    Planned,
    ScriptLevel,
    ScriptMove,
    ScriptSteps,
    Stage,
)
from elastic.protocol.messages.to_worker import SaveConcluded
from elastic.protocol.timeouts import UNLIMITED_S, timeouts_of
from elastic.protocol.worker_spec import WorkerSpec
from elastic.store.catalogue import Damage

if TYPE_CHECKING:
    from elastic.on_ray.actors import ControllerActor

STATUS_EVERY_S = 0.5
STEP_STATUS_EVERY_S = 0.1
START_TOLD_S = 2.0
"""A start that takes no longer is not told."""
SCALE_S = 10.0
"""So long an answer to `elastic scale` waits for its decision, and again for its record."""

log = logging.getLogger(__name__)


async def supervise(actor: "ControllerActor", order: dict[str, Any]) -> dict[str, Any]:
    """Run the order from start to end; the answer is the driver's
    (`elastic.driver.launch.conclude`)."""
    head = HeadCalls()
    begin = functools.partial(actors.start_rendezvous, order["run_id"])
    run = Supervisor(actor, order, head, await asyncio.wrap_future(head.start(begin)))
    try:
        return await run.run()
    finally:
        await run.close()


def tell_failure(task: asyncio.Task[None]) -> None:
    """A run goes on whose status nobody writes any more; its log says why."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the status is not written any more", exc_info=error)


def unix_clock() -> Callable[[], float]:
    """Unix time that never jumps."""
    started = time.time() - time.monotonic()
    return lambda: started + time.monotonic()


class Supervisor:
    """Owns the run's cluster and its recorder."""

    def __init__(
        self, actor: "ControllerActor", order: dict[str, Any], head: HeadCalls, rendezvous: Any
    ) -> None:
        self.actor, self.order = actor, order
        self.config: RunConfig = order["config"]
        self.limits = limits_of(self.config)
        self._host = naming.this_host()
        self._workload = actors.share(order["workload"])
        self._meters = Meters(order["name"], order["run_id"])
        self._status_due = asyncio.Event()
        self._resizing: deque[asyncio.Future[None]] = deque()
        """Of each `Resized` that was said and is not decided, in that order."""
        self._is_over = self._is_rescaled = False
        self._pings: asyncio.Task[None] | None = None
        self._last_reason = ""
        self.decision: Decision | None = None
        self._now = unix_clock()
        self.record = recorder = Recorder(
            order,
            self.limits,
            now=self._now,
            fail=self._fail,
            tell_of_save=self._tell_of_save,
        )
        self.cluster = RayCluster(
            token=order["token"],
            detect_s=self.config.detect_s,
            rendezvous=rendezvous,
            head=head,
            now=self._now,
            host=self,
        )
        factor = self.config.faults.replace_stragglers
        note = functools.partial(recorder.note, "straggler")
        self.stragglers = Stragglers(factor, note, self._replace)
        self.roll_call = RollCall(functools.partial(self.record.note, "missed"))
        if not self.limits.is_whole:
            self.cluster.holders.turn_on(order["run_id"])

    async def run(self) -> dict[str, Any]:
        self.record.writer.loop = asyncio.get_running_loop()
        self._controller_address = await self.cluster.links.open(self._host)
        note = functools.partial(self.record.note, "data")
        self.actor.listen(
            stop=self.cluster.request_stop,
            end_now=self._end_now,
            note=note,
            scale=self._scale_on_record,
        )
        timeouts = timeouts_of(self.config.detect_s)
        self._pings = self.cluster.in_background(
            self.cluster.stores.watch(timeouts.rendezvous_s, timeouts.controller_s)
        )
        taken_over = await self._taken_over() if self.actor.has_predecessor else None
        self.cluster.in_background(self._show_start())
        self.actor.link_address = self._controller_address
        status = asyncio.create_task(self._keep_status())
        status.add_done_callback(tell_failure)
        drains = self.cluster.in_background(watch_drains(self.cluster))
        places = self.cluster.in_background(self._watch_places())
        begins = self.cluster.in_background(self._watch_start())
        try:
            finished = await loop.control(
                self.cluster,
                self.limits,
                self._record,
                self._now(),
                taken_over,
                self.order["earlier_generations"],
            )
        except Exception as error:  # whatever it is, the run ends with a result
            log.exception("the controller failed")
            finished = s.Finished("failed", f"internal error: {error!r}")
            self._last_reason = finished.reason
            if self.decision is not None:
                self.decision = self.decision._replace(phase=finished)
        finally:
            drains.cancel()
            places.cancel()
            begins.cancel()
            self._is_over = True
            self._status_due.set()
        recorder, result = self.record, self._result(finished)
        failed = self.cluster.failed
        recorder.note("own_s", self.stragglers.own_s)
        await recorder.close(self._status, result)
        return {
            "result": result,
            "reason": finished.reason,
            "wrong_input": self.cluster.wrong_input,
            "user_error": failed.pickled if failed is not None else b"",
            "failed_rank": failed.rank if failed is not None else None,
            "is_open": recorder.directory is not None,
            "storage_warning": recorder.writer.warning(recorder.directory, recorder.committed),
        }

    async def _taken_over(self) -> tuple[s.Ledger, s.Phase, e.Adopted]:
        """What it takes over. Where that fails, as while the store is away, it is tried again by
        another process, as long as workers wait for one."""
        try:
            return await self._take_over()
        except Exception:
            log.exception("the run cannot be taken over now")
            await asyncio.get_running_loop().run_in_executor(None, self.actor.start_anew)
            raise

    async def _take_over(self) -> tuple[s.Ledger, s.Phase, e.Adopted]:
        """Go on where this run's last controller died: its journal, and whoever lives."""
        self.cluster.stores.rendezvous.forget.remote()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, actors.find_workers, self.order["run_id"])
        past = await self.record.reopen()
        if past is None:  # it died before there was anything on record
            decision = start(self.limits, self._now(), self.order["earlier_generations"])
            self._record(None, decision)
        else:
            directory = self.record.directory
            assert directory is not None
            self.decision = decision = past.decision
            has_formed = decision.ledger.num_generations > 0
            self.cluster.take_over(
                directory.place, directory.last_step, past.last_metrics, has_formed=has_formed
            )
            self.actor.place, self.actor.has_begun = directory.place, has_formed
            self.cluster.progress.evaluations.recorded = past.last_evaluation
        self.cluster.failover = failover = Failover(self.cluster, found)
        self.actor.link_address = self._controller_address
        event = await failover.collect(decision.ledger, decision.phase, self.limits)
        self.cluster.failover = None
        return decision.ledger, decision.phase, event

    @property
    def publisher(self) -> Publisher:
        return self.record.publisher

    # --- workers ------------------------------------------------------------------
    def spawn(self, worker: int) -> Any:
        """The pending actor of worker number n."""
        return actors.spawn_worker(
            run_id=self.order["run_id"],
            name=worker_name(worker),
            workload=self._workload,
            need=self.config.resources.need(self.order["device"]),
        )

    async def _watch_places(self) -> None:
        need = self.config.resources.need(self.order["device"])
        await watch_waiting(self.cluster.workers, self._wanted, need, self._on_waits)

    def _wanted(self) -> tuple[int, int]:
        """From how many workers to how many the run is to have now."""
        ledger = self.decision.ledger if self.decision is not None else s.Ledger()
        now = in_force(ledger, self.limits)
        return now.min_workers, now.max_workers

    async def _watch_start(self) -> None:
        """Whoever looks learns how far the first workers are, if that takes long."""
        await asyncio.sleep(START_TOLD_S)
        while not self.actor.has_begun:
            links, workers = self.cluster.links, self.cluster.workers
            line = start_line(workers, self._wanted()[0], links.is_connected)
            if line != self.actor.starts:
                log.info('reason="%s"', line)
                self.actor.starts = line
                self._status_due.set()
            await asyncio.sleep(LOOK_EVERY_S)
        self.actor.starts = ""

    def _on_waits(self, line: str) -> None:
        if line:
            log.info('reason="%s"', line)
        self.actor.waits_for = line
        self._status_due.set()

    def begin_rendezvous(self) -> Any:
        """Its actor; the one of before, if that lives."""
        return actors.start_rendezvous(self.order["run_id"])

    def costly(self) -> tuple[Costly, ...]:
        """Where usual times say nothing now, by the ledger."""
        return self.decision.ledger.losses.costly if self.decision else ()

    def stage_of(self, worker: int) -> str:
        """A member's place in a pipeline, to be added to why it is lost; empty if it has none."""
        return stage_text(self.record.planned, self.decision, worker)

    def members_stages(self) -> tuple[Stage | None, ...]:
        """Of the members, by rank; empty if they have no pipeline, or have not said it."""
        return stages_of(self.record.planned, self.decision)

    def spec_of(self, worker: int) -> WorkerSpec:
        return worker_spec(
            self.config,
            self.order,
            worker,
            self._controller_address,
            self.record.place,
            self.cluster.has_formed,
        )

    async def open_at(self, step: int, damaged: list[Damage]) -> str:
        """The first worker's checks passed, or a later one starts again from an earlier step: the
        run directory stands at that step, the damaged checkpoints set aside. Gives its place."""
        self.actor.place = await self.record.open_at(step, damaged)
        self.actor.has_begun = True
        return self.actor.place

    async def _show_start(self) -> None:
        """Whoever looks sees that the run waits for its workers."""
        self.actor.place = await self.record.open()

    def _tell_of_save(self, step: int, is_published: bool) -> None:
        for worker in tuple(self.cluster.workers):
            self.cluster.links.send(worker, SaveConcluded(step, is_published))

    def on_unprotected(self, fields: dict[str, Any]) -> None:
        """Peer memory does not have the newest rows of all members, or has them again."""
        self.record.note("unprotected", fields)
        self._status_due.set()

    def on_planned(self, said: Planned | OfScript | Fingerprint) -> None:
        """How the members of a generation share the model; at which level their script runs, where
        it is, and its steps; what the bits depend on."""
        match said:
            case Fingerprint():
                self.record.record_fingerprint(said)
            case Planned():
                for warning in said.warnings:
                    log.warning('generation=%d reason="%s"', said.generation, warning)
                self.record.record_planned(said)
            case ScriptLevel():
                self.record.record_level(said)
            case ScriptMove():
                self.roll_call.hear(said)
            case ScriptSteps():
                self.record.record_applied(said)
                if stepped := self.roll_call.hear_steps(said, self._now()):
                    self.cluster.say(stepped)
                return
        self._status_due.set()

    def _fail(self, why: str) -> None:
        self.cluster.cancel("failed", why)

    def _end_now(self, why: str) -> None:
        """Nothing is saved any more: the reason says what that costs."""
        step = self.decision.ledger.step if self.decision is not None else 0
        self.cluster.cancel("stopped", why + what_is_lost(step, self.record.committed or 0))

    async def _scale_on_record(self, workers: tuple[int, int]) -> str | tuple[int, int]:
        """As `_scale`; by the answer a successor knows of it, too, unless storage is away."""
        answer = self._scale(workers)
        if isinstance(answer, str):
            return answer
        try:
            await asyncio.wait_for(self._resizing[-1], SCALE_S)
        except TimeoutError:
            return "its controller is too busy to decide; try again in a moment"
        if self.decision is None or isinstance(self.decision.phase, s.Ending | s.Finished):
            return "the run is ending"
        with suppress(TimeoutError):
            await asyncio.wait_for(self.record.settle(), SCALE_S)
        return answer

    def _scale(self, workers: tuple[int, int]) -> str | tuple[int, int]:
        """From how many workers to how many the run is to have from now on, not more than have
        something to do; or why not."""
        if self.decision is not None and isinstance(self.decision.phase, s.Ending | s.Finished):
            return "the run is ending"
        try:
            new = RunConfig.from_json({**self.config.to_json(), "workers": list(workers)})
        except ValueError as error:
            return str(error)
        self._resizing.append(asyncio.get_running_loop().create_future())
        self.cluster.say(e.Resized(new.min_workers, new.max_workers, self._now()))
        return new.min_workers, new.max_workers

    def _rescale_once(self, decision: Decision) -> None:
        """A script begins with all its workers, and goes on with fewer; unless it was given
        another number meanwhile, perhaps by a controller that died."""
        then_workers = self.order.get("then_workers")
        is_resized = decision.ledger.max_workers > 0 or self._is_rescaled
        if then_workers and not is_resized and isinstance(decision.phase, s.Running):
            self._is_rescaled = True
            self._scale(then_workers)

    def _replace(self, worker: int, why: str) -> None:
        now = self._now()
        self.cluster.say(e.DrainNotice(worker, why, now + UNLIMITED_S, now))

    # --- decisions, status and result -------------------------------------------------
    def _record(self, event: e.Event | None, decision: Decision) -> None:
        """Every event and what was decided."""
        before, self.decision = self.decision, decision
        self._last_reason = decision.reason or self._last_reason  # the next may come before a look
        self.record.record(event, before, decision)
        if isinstance(event, e.Resized) and not (decided := self._resizing.popleft()).done():
            decided.set_result(None)
        self._rescale_once(decision)
        if decision.reason:
            log.info(
                'generation=%d step=%d phase=%s reason="%s"',
                decision.ledger.generation,
                decision.ledger.step,
                type(decision.phase).__name__.lower(),
                decision.reason,
            )
            self._status_due.set()

    async def _keep_status(self) -> None:
        while not self._is_over:
            if self.decision is not None:
                status = self._status()
                self.record.write_status(status)
                self._show_meters(status)
            try:
                await asyncio.wait_for(self._status_due.wait(), STATUS_EVERY_S)
            except TimeoutError:
                continue
            self._status_due.clear()
            await asyncio.sleep(STEP_STATUS_EVERY_S / 5)

    def _show_meters(self, status: dict[str, Any]) -> None:
        record = self.record
        self._meters.show(meters_of(status, record.last_metrics, record.account, record.lost_steps))

    def _status(self) -> dict[str, Any]:
        assert self.decision is not None
        watches = (slot.watch for slot in self.cluster.workers.values())
        self.stragglers.look((w.heartbeat for w in watches if w), self.decision.ledger.step)
        self._call_roll(self.decision)
        return status_of(
            self.decision,
            self.cluster.workers,
            steps=self.config.steps,
            committed_checkpoint=self.record.committed,
            node_ip=self._host,
            reason=self._reason(self.decision),
            planned=self.record.planned,
            level=self.record.level,
            wanted=self._wanted(),
            account=self.record.account,
            lost_steps=self.record.lost_steps,
        )

    def _call_roll(self, decision: Decision) -> None:
        """Whoever looks, the driver too, learns which ranks of a script others wait for."""
        phase = decision.phase
        size = phase.membership.world_size if isinstance(phase, s.Running) else 0
        self.roll_call.look(decision.ledger.generation, size)
        if self.actor.has_begun:
            self.actor.starts = self.roll_call.told

    def _reason(self, decision: Decision) -> str:
        if isinstance(decision.phase, s.Waiting):
            self._last_reason = decision.phase.reason or self._last_reason
        said = (self._last_reason, self.stragglers.reason, self.roll_call.reason)
        said += (self.cluster.protection.reason,)
        starts = "" if self.actor.has_begun else self.actor.starts
        now = self.actor.waits_for or starts, self.record.trouble.now
        return "; ".join(filter(None, (*said, *now)))

    def _result(self, finished: s.Finished) -> dict[str, Any]:
        assert self.decision is not None
        return result_of(
            finished,
            self.decision,
            self.record.account,
            self.record.last_metrics.get("loss"),
            self.record.lost_steps,
            self.record.level,
        )

    async def close(self) -> None:
        await self.cluster.close()
        naming.end(self.cluster.stores.rendezvous)
        if self._pings is not None:
            self._pings.cancel()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, end_feed, self.order["run_id"])
        self.record.writer.executor.shutdown(wait=True)
