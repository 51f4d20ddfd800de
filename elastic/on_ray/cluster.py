# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The controller's hands: carries out commands on Ray actors and links, and says what happened.

It runs inside the controller actor (actors.py) and decides nothing: elastic/control does.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from elastic.control import commands as c
from elastic.control import events as e
from elastic.control.detection.patience import PhaseOfStep
from elastic.control.translation import Eventful, copying, event_of, interruption
from elastic.on_ray.background import Background
from elastic.on_ray.backup.servers import BackupServers
from elastic.on_ray.backup.status import Protection
from elastic.on_ray.cluster_view import Host
from elastic.on_ray.detection.broken_links import wait_for_return
from elastic.on_ray.detection.diagnosis import Diagnosis
from elastic.on_ray.failover import Failover, has_returned
from elastic.on_ray.head_calls import HeadCalls
from elastic.on_ray.links import LinkServer
from elastic.on_ray.record.progress import Progress
from elastic.on_ray.slots import (
    Slot,
    end_process,
    note_place,
    see_off,
    why_not_started,
)
from elastic.on_ray.stores import Stores
from elastic.protocol.errors import WorkerFailed, WrongInput
from elastic.protocol.membership import Membership, worker_name
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t
from elastic.protocol.messages.pulse import Heartbeat, Said
from elastic.protocol.timeouts import timeouts_of
from elastic.store.catalogue import Damage
from elastic.store.files import first_line
from elastic.store.remote import StoreAway

log = logging.getLogger(__name__)
FAILURE_GRACE_S = 1.0
"""How long a worker that reported the user's exception may take to hand over the exception."""


@dataclass
class RayCluster:
    """The `Cluster` of elastic/controller/loop.py over real actors."""

    token: str
    detect_s: float | None
    rendezvous: InitVar[ActorHandle[Any]]
    head: HeadCalls
    host: Host
    now: Callable[[], float]
    """Unix time that never jumps."""
    workers: dict[int, Slot] = field(default_factory=dict[int, Slot])
    wrong_input: str | None = None
    failed: WorkerFailed | None = None
    """Whose user's code has raised."""
    log_folder: str | None = None

    def __post_init__(self, rendezvous: ActorHandle[Any]) -> None:
        self.links = LinkServer(self.token, self._on_report, self._on_pulse, self._on_link_ended)
        self.events: asyncio.Queue[e.Event] = asyncio.Queue()
        self._timeouts = timeouts_of(self.detect_s)
        self.stores = Stores(rendezvous, self._timeouts.start_s, self._begin_rendezvous)
        self._tick_at = time.monotonic() + self._timeouts.tick_s
        self.in_background = Background(self._on_background_failure).start
        self.has_formed = False
        self._loading: int | None = None
        self._untold: c.Form | None = None
        """What its members are still to be told."""
        self._falling = asyncio.Lock()
        self.failover: Failover | None = None
        self._diagnosis = Diagnosis(self)
        self.progress = Progress(self.host.record, self.say, self.now)
        self.protection = Protection(self.host.on_unprotected, self.now)
        self.holders = BackupServers(
            self.token,
            self.detect_s,
            in_background=self.in_background,
            head=self.head,
            slots=self.workers,
            links=self.links,
            on_lost=self.protection.hear_lost,
            now=self.now,
        )

    # --- commands -----------------------------------------------------------------
    async def execute(self, command: c.Command) -> None:
        match command:
            case c.Spawn(workers=workers):
                self._spawn(workers)
            case c.Load(worker=worker):
                self._loading = worker
                self.in_background(self._load(worker))
            case c.Sync():
                self._sync(command)
            case c.Pause() | c.Checkpoint() | c.Keep() | c.Abort() | c.Recall():
                self._interrupt(command)
            case c.Form():
                await self._form(command)
            case c.Finish(membership=membership, outcome=outcome):
                self._finish(membership, outcome)
            case c.Retire(workers=workers):
                for worker in workers:
                    self.retire(worker)
            case c.Publish() | c.Discard():
                self.host.publisher.conclude(command)

    async def _begin_rendezvous(self) -> ActorHandle[Any]:
        return await asyncio.wrap_future(self.head.start(self.host.begin_rendezvous))

    async def _load(self, worker: int) -> None:
        await self.host.record.settle()
        self.links.send(worker, t.Load(self.host.record.place, self.recorded_step))

    def _sync(self, command: c.Sync) -> None:
        of_next = (*command.members, *command.next_members)
        slots = {w: s for w in (command.source, *of_next) if (s := self.workers.get(w))}
        addresses = {w: slot.peer_address for w, slot in slots.items()}
        nodes = {w: slot.node_id for w, slot in slots.items()}
        if command.worker in self.workers:  # its loss may wait among the events
            self.workers[command.worker].state = "syncing"
        self.links.send(
            command.worker, copying(command, addresses, nodes, self.host.members_stages())
        )

    def _interrupt(self, command: c.Pause | c.Checkpoint | c.Keep | c.Abort | c.Recall) -> None:
        membership, generation = command.membership, command.membership.generation
        is_unheard = self._untold is not None  # an Abort means nothing to who heard of no Form
        if isinstance(command, c.Abort | c.Recall):
            self._untold = None
        for rank, worker in enumerate(membership.workers):
            self.links.send(worker, interruption(command, rank, is_unheard=is_unheard))
        if isinstance(command, c.Abort | c.Recall):
            self.progress.commits.give_up(generation)
            self.stores.open(generation + 1)
            self._diagnosis.expect_answers(membership)

    def _finish(self, membership: Membership, outcome: str) -> None:
        generation, size = membership.generation, membership.world_size
        self.progress.commits.end(generation)
        for rank, worker in enumerate(membership.workers):
            told = t.Finish(generation, rank, size, outcome, self.log_folder, self.recorded_step)
            self.links.send(worker, told)

    def _spawn(self, workers: tuple[int, ...]) -> None:
        for worker in workers:
            actor = self.head.start(partial(self.host.spawn, worker))
            record = Slot(actor, last_seen=self.now())
            self.workers[worker] = record
            record.task = self.in_background(self._watch(worker, record))

    async def _watch(self, worker: int, record: Slot) -> None:
        """One never-returning call per worker: Ray's news of its death is the call's end."""
        why = "it ended before its model was built"
        try:
            actor = await asyncio.wrap_future(record.actor)
            try:
                placed = cast(Any, actor).is_free.remote()  # a pending actor's calls wait in order
                placed.future().add_done_callback(partial(note_place, record))
                await cast(Any, actor).run.remote(self.host.spec_of(worker))
            except ActorUnavailableError:  # Ray's connections break, too, and nobody is dead of it
                await has_returned(actor)
                self.user_failed(worker, "failed: see its log")
                return
        except RayTaskError as error:
            failed = error.cause if isinstance(error.cause, WorkerFailed) else None
            if failed is not None and not self._is_node_s_fault(record):
                self.failed = self.failed or failed
            why = str(failed or first_line(error.cause or error))
            loop = asyncio.get_running_loop()  # its own report may still be on its way
            loop.call_later(FAILURE_GRACE_S, self.user_failed, worker, why)
            return
        except RayError as error:  # dead, out of memory, no environment on its node
            why = why_not_started(error)
            log.warning('worker=%s reason="%s"', worker_name(worker), why)
        if record.state == "pending":
            self.lost(worker, "start_failed", record.last_words or why)
        else:
            self.lost(worker, "process_died")

    def user_failed(self, worker: int, fallback: str) -> None:
        """The user's code raised in `worker`: said once, in its own words if any."""
        record = self.workers.get(worker)
        if record is None or record.has_failed:
            return
        record.has_failed, why = True, record.failure or fallback
        if self._is_node_s_fault(record):
            self.lost(worker, record.failed_as, " ".join(why.split()))  # a reason is one line
        else:
            self.wrong_input = self.wrong_input or record.wrong_input
            self.say(e.UserFailed(worker, why, self.now()))

    def _is_node_s_fault(self, record: Slot) -> bool:
        """What fails in a newcomer has worked where the others train: the run goes on there."""
        return self.has_formed and (record.is_unfit or record.state in ("pending", "standby"))

    async def _form(self, form: c.Form) -> None:
        """Whatever keeps the Form is waited for beside the loop, which must hear of losses."""
        membership, self.has_formed = form.membership, True
        self._untold = form
        self.progress.evaluations.go_back(form.step)
        is_alone = membership.world_size == 1
        if not is_alone:
            self.stores.open(membership.generation)
        store = self.stores.opened(membership.generation)
        has_fallen = form.step < self.recorded_step  # the last with the state is lost
        is_known = not self.progress.is_unknown_to(membership.workers)
        if not has_fallen and is_known and (is_alone or store is not None):
            await self._tell_form(form, store)
        else:
            self.in_background(self._form_later(form))

    async def _form_later(self, form: c.Form) -> None:
        """Nothing is said any more of a generation that was given up meanwhile."""
        generation = form.membership.generation
        async with self._falling:  # one at a time, each to its end
            if form.step < self.recorded_step:
                await self.host.open_at(form.step, [])
                self.progress.recorded_step = form.step
            elif self.progress.is_unknown_to(form.membership.workers):
                await self.progress.settle()
        if self._untold is not form:
            return
        store = None
        patience_s = self._timeouts.join_s - self._timeouts.confirm_s  # else it is only late
        try:
            if form.membership.world_size > 1:
                store = await self.stores.address(generation, patience_s)
        except (TimeoutError, RayError) as error:
            if self._untold is form:
                why = f"generation {generation}: {first_line(error)}"
                self.say(e.CollectiveFailed(generation, 0, why, self.now(), is_stall=True))
            return
        await self._tell_form(form, store)

    async def _tell_form(self, form: c.Form, store: t.StoreAddress | None) -> None:
        await self.holders.known()
        if self._untold is not form:
            return
        membership, self._untold = form.membership, None
        if self.progress.is_unknown_to(membership.workers):
            for worker in membership.workers:
                self.send_word(worker)
        self.progress.members = frozenset(membership.workers)
        self.protection.form(membership.workers, form.step)
        for rank, worker in enumerate(membership.workers):
            vote, payload = None, b""
            if worker in form.roll_forward:
                vote, payload = self.progress.commits.vote_of(form.step, form.origin)
            told = t.Form(
                generation=membership.generation,
                rank=rank,
                world_size=membership.world_size,
                step=form.step,
                then_pause=form.then_pause,
                recorded_step=self.recorded_step,
                store=store,
                vote=vote,
                evaluation=self.progress.evaluations.newest(membership.workers),
                holders=self.holders.for_worker(worker),
                order=form.order,
                origin=form.origin,
                payload=payload,
            )
            self.links.send(worker, told)

    def take_over(
        self, place: str, recorded_step: int, last_metrics: dict[str, Any], *, has_formed: bool
    ) -> None:
        """The run is on record, by a controller before this one."""
        self.log_folder, self.has_formed = place, has_formed
        self.progress.recorded_step = recorded_step
        self.progress.recorded_generation = last_metrics.get("generation")

    @property
    def recorded_step(self) -> int:
        return self.progress.recorded_step

    def retire(self, worker: int) -> None:
        """End a worker's process, whatever state it is in; no loss is reported."""
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self.links.drop(worker)
        if record.task is not None:
            record.task.cancel()
        record.end()

    def _fence(self, record: Slot) -> None:
        """A worker that counts as lost never speaks again, even if it is only frozen."""
        if self.is_here(record):
            end_process(record.pid)
        record.end()

    # --- events -------------------------------------------------------------------
    async def next_event(self) -> e.Event:
        left_s = self._tick_at - time.monotonic()
        if left_s > 0:
            with suppress(TimeoutError):  # time for a tick
                async with asyncio.timeout(left_s):  # wait_for would make a task of each event
                    return await self.events.get()
        is_late = time.monotonic() - self._tick_at > self._timeouts.late_s
        self._tick_at = time.monotonic() + self._timeouts.tick_s
        if not is_late:  # else we were frozen ourselves, and heartbeats wait to be read
            self._diagnosis.look()
        return e.Tick(self.now())

    def say(self, event: e.Event) -> None:
        self.events.put_nowait(event)

    def request_stop(self, reason: str) -> None:
        self.say(e.StopRequested(reason, self.now()))

    def cancel(self, outcome: str, reason: str) -> None:
        self.say(e.Cancelled(outcome, reason, self.now()))

    def lost(
        self,
        worker: int,
        cause: str,
        why: str = "",
        last_seen: float | None = None,
        slow_in: PhaseOfStep | None = None,
    ) -> None:
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self.links.drop(worker)
        self._fence(record)
        last_seen, cause = last_seen or max(record.last_seen, 0.0), record.last_cause or cause
        why = why or record.why_gone(worker_name(worker), self.log_folder)
        self.say(e.WorkerLost(worker, cause, last_seen, self.now(), why, slow_in))

    def is_here(self, record: Slot) -> bool:
        """Whether its process is on this node."""
        return bool(record.pid) and record.node_id == ray.get_runtime_context().get_node_id()

    def _on_link_ended(self, worker: int, was_reset: bool) -> None:
        record = self.workers.get(worker)
        if record is not None:
            self.in_background(wait_for_return(self, worker, record, was_reset=was_reset))

    def _on_pulse(self, worker: int, said: Said) -> None:
        record = self.workers.get(worker)
        if not isinstance(said, Heartbeat):
            if record is not None:
                self._diagnosis.hear(worker, said)
        elif record is not None:
            self._on_heartbeat(worker, record, said)
        elif self.failover is not None:
            self.failover.hear_pulse(worker, said)

    def _on_heartbeat(self, worker: int, record: Slot, heartbeat: Heartbeat) -> None:
        record.beat(heartbeat, self.now())
        self.send_word(worker)
        self._diagnosis.hear_beat(worker)

    def send_word(self, worker: int) -> None:
        self.links.send(worker, self.progress.word())

    def _on_report(self, worker: int, report: r.Report) -> None:
        record = self.workers.get(worker)
        if record is not None:
            record.last_seen = self.now()
            self._hear(worker, record, report)
        elif not (
            isinstance(report, r.Introduction)
            and self.failover is not None
            and self.failover.hear(worker, report)
        ):
            self.links.drop(worker)

    def _hear(self, worker: int, record: Slot, report: r.Report) -> None:  # noqa: C901
        match report:
            case r.Introduction():
                self._on_return(worker, record, report)
            case r.Started():
                self._on_started(worker, record, report.process)
            case r.Loaded():
                self._on_loaded(worker, record, report)
            case r.WrongInput():
                self._on_wrong_input(worker, record, report)
            case r.UserFailed():
                self._on_user_failed(worker, record, report)
            case r.LastWords(why, cause):
                record.last_words, record.last_cause = why, cause
            case r.Diverged():
                self._diagnosis.hear_diverged(report)
            case r.Committed():
                self.progress.commits.hear(report)
                record.step = max(record.step, self.recorded_step)
            case r.Measured(rows):
                self.host.record.record_anatomy(worker, rows)
            case r.Held():
                self.progress.commits.hear_held(report)
            case r.Planned() | r.ScriptLevel() | r.ScriptMove() | r.ScriptSteps() | r.Fingerprint():
                self.host.on_planned(report)
            case r.Protected():
                self.protection.hear(worker, report)
            case r.HolderSilent(holder):
                self.holders.hear_silent(holder)
            case r.Evaluated(evaluation):
                self.progress.evaluations.hear(evaluation)
            case _:
                self._on_event(worker, record, report)

    def _on_event(self, worker: int, record: Slot, report: Eventful) -> None:
        """What the decisions learn of."""
        match report:
            case r.Joined():
                self.progress.hear_joined(report)
            case r.Suspended(generation) if self.progress.commits.is_news(generation):
                self.progress.hear_suspended(worker, report)
                self._diagnosis.hear_answer(worker)
            case r.PartSaved():
                self.host.publisher.hear(report)
            case _:
                pass
        record.hear(report)
        self._diagnosis.hear_report(worker, report)
        self.say(event_of(worker, report, self.now()))

    def _on_return(self, worker: int, record: Slot, said: r.Introduction) -> None:
        """Over another connection. What else counts it says again."""
        if said.process is not None and not record.pid:  # that it has started may be lost
            self._on_started(worker, record, said.process)
        self.send_word(worker)

    def _on_started(self, worker: int, record: Slot, process: r.Process) -> None:
        record.locate(process)
        self.holders.on_node(record.node_id)
        self.holders.tell(worker)
        record.state = "standby"
        if self.log_folder is not None:
            self.links.send(worker, t.LogTo(self.log_folder))
        self.say(e.WorkerStarted(worker, self.now(), record.node_id))

    def _on_loaded(self, worker: int, record: Slot, report: r.Loaded) -> None:
        async def open_then_say() -> None:
            damaged = [Damage(step, what) for step, what in report.damaged]
            self.log_folder = folder = await self.host.open_at(report.step, damaged)
            self.progress.recorded_step = report.step
            self.progress.commits.vote = None
            for other in self.workers:
                self.links.send(other, t.LogTo(folder))
            self.say(e.Loaded(worker, report.step, self.now(), report.origin))

        if self._loading != worker:
            return  # a controller before this one had asked for it, or it is said again
        self._loading, record.state = None, "ready"
        self.in_background(open_then_say())

    def _on_background_failure(self, error: BaseException) -> None:
        """It ends the run."""
        if isinstance(error, WrongInput):
            self.wrong_input = str(error)
            self.cancel("failed", str(error))
        elif isinstance(error, StoreAway):
            log.error('reason="%s"', error)
            self.cancel("failed", str(error))
        else:
            log.error("controller error", exc_info=error)
            self.cancel("failed", f"internal error: {error!r}")

    def _on_wrong_input(self, worker: int, record: Slot, report: r.WrongInput) -> None:
        record.wrong_input = record.failure = report.message
        record.is_unfit = report.is_unfit
        self.user_failed(worker, report.message)

    def _on_user_failed(self, worker: int, record: Slot, report: r.UserFailed) -> None:
        record.failure = report.message  # the exception itself arrives as the end of run()
        loop = asyncio.get_running_loop()
        loop.call_later(FAILURE_GRACE_S, self.user_failed, worker, report.message)

    async def close(self) -> None:
        """End every process of the run and wait until those on this node are gone."""
        self._untold = None
        slots = tuple(self.workers.values())
        for worker in tuple(self.workers):
            self.retire(worker)
        self.links.close()
        self.holders.close()
        self.head.close()
        await asyncio.gather(see_off(slots), self.head.rest())
