"""The run inside the controller's process: cluster, decisions, journal and files put together.

`supervise` is hosted by the controller actor. The decisions are elastic/control's, the hands are
elastic/on_ray/cluster.py's, the files are elastic/store's.
"""

import asyncio
import functools
import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from elastic import controller
from elastic.checkpoints import Checkpoints
from elastic.commands.curves import Curves
from elastic.config import RunConfig
from elastic.control import state as s
from elastic.control.accounting import account, open_account
from elastic.control.replay import is_news
from elastic.control.state import Decision
from elastic.control.transition import start
from elastic.limits import limits_of, worker_spec
from elastic.on_ray import actors
from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.drain import watch_drains
from elastic.on_ray.feed import end_feed
from elastic.on_ray.host import Host
from elastic.on_ray.takeover import Takeover
from elastic.past import Landmark, Past, line_of, read_past
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.protocol.seams import WorkerSpec
from elastic.protocol.waits import UNLIMITED_S, waits_of
from elastic.status import result_of, status_of
from elastic.store.catalogue import Damage
from elastic.store.files import first_line, open_folder, place_of, read_json, sees_probe
from elastic.store.run_directory import RunDirectory
from elastic.stragglers import Stragglers
from elastic.writer import Writer

if TYPE_CHECKING:
    from elastic.on_ray.actors import ControllerActor

LEDGER_EVERY = 1000
"""Events between two journal lines that hold the whole ledger."""
STATUS_EVERY_S = 0.5
STEP_STATUS_EVERY_S = 0.1

log = logging.getLogger(__name__)


async def supervise(actor: "ControllerActor", order: dict[str, Any]) -> dict[str, Any]:
    """Run the order from start to end; the answer is the driver's (elastic/run.py `conclude`)."""
    run = Supervisor(actor, order)
    try:
        return await run.run()
    finally:
        await run.close()


class Supervisor:
    """Owns the run's cluster and its run directory."""

    def __init__(self, actor: "ControllerActor", order: dict[str, Any]) -> None:
        self.actor, self.order = actor, order
        self.config: RunConfig = order["config"]
        self.limits = limits_of(self.config)
        self.directory: RunDirectory | None = None
        self.checkpoints: Checkpoints | None = None
        self.curves: Curves | None = None
        self.lost_steps = 0
        self.last_metrics: dict[str, Any] = {}
        self._early_lines: list[dict[str, Any]] = []
        self.writer = Writer(self._storage_failed, lambda what: self.cluster.cancel("failed", what))
        self.trouble = self.writer.trouble
        self._status_due = asyncio.Event()
        self._events = 0
        self._is_over = False
        factor = self.config.faults.replace_stragglers
        note = functools.partial(self._note, "straggler")
        self.stragglers = Stragglers(factor, note, self._replace)
        self._host = actors.this_host()
        self._workload = actors.share(order["workload"])
        self.cluster = RayCluster(
            token=order["token"],
            detect_s=self.config.detect_s,
            rendezvous=actors.start_rendezvous(order["run_id"]),
            host=Host(
                spawn=self._spawn,
                spec_of=self._spec_of,
                place=self._place(),
                settle=self.writer.settle,
                on_loaded=self._on_loaded,
                on_rolled_back=self._on_rolled_back,
                on_publish=self._on_publish,
                on_discard=self._on_discard,
                on_step=self._on_step,
                recorded_step=lambda: self.directory.safe_step if self.directory else 0,
                on_stacks=self._on_stacks,
                on_evaluation=functools.partial(self._note, "evaluation"),
            ),
        )
        if self.limits.is_sharded:
            lease_s = waits_of(self.config.detect_s).lease_s
            self.cluster.holders.turn_on(order["run_id"], lease_s)
        self.account = open_account(self.cluster.now())
        self.decision: Decision | None = None

    async def run(self) -> dict[str, Any]:
        self._loop = self.writer.loop = asyncio.get_running_loop()
        self._controller_address = await self.cluster.links.open(self._host)
        end_now = functools.partial(self.cluster.cancel, "stopped")
        note = functools.partial(self._note, "data")
        self.actor.listen(stop=self.cluster.request_stop, end_now=end_now, note=note)
        taken_over = await self._take_over() if self.actor.has_predecessor else None
        self.actor.link_address = self._controller_address
        status = asyncio.create_task(self._keep_status())
        status.add_done_callback(lambda task: task.cancelled() or task.exception())
        drains = self.cluster.in_background(watch_drains(self.cluster))
        try:
            finished = await controller.control(
                self.cluster, self.limits, self._record, self.cluster.now(), taken_over
            )
        except Exception as error:  # whatever it is, the run ends with a result
            log.exception("the controller failed")
            finished = s.Finished("failed", f"internal error: {error!r}")
        finally:
            drains.cancel()
            self._is_over = True
            self._status_due.set()
        result = self._result(finished)
        await self._close_files(result)
        return {
            "result": result,
            "reason": finished.reason,
            "wrong_input": self.cluster.wrong_input,
            "user_error": self.cluster.user_error,
            "is_open": self.directory is not None,
            "storage_warning": self.writer.warning(self.directory, self._committed),
        }

    async def _take_over(self) -> tuple[s.Ledger, s.Phase, s.Adopted]:
        """Go on where this run's last controller died: its journal, and whoever lives."""
        run = self._loop.run_in_executor
        self.cluster.rendezvous.forget.remote()
        found = await run(None, actors.find_workers, self.order["run_id"])
        opened = await run(self.writer.executor, self._reopen)
        if opened is None:  # it died before there was anything on record
            decision = start(self.limits, self.cluster.now())
            self._record(None, decision)
        else:
            self.directory, past = opened
            self.checkpoints = self._make_checkpoints(self.directory)
            await run(self.writer.executor, self.checkpoints.take_over)
            self.cluster.take_over(self.directory.place, self.directory.last_step)
            self.actor.place = self.directory.place
            self.decision, self.account, self.lost_steps, self.last_metrics, evaluated = past
            self.cluster.evaluations.recorded = evaluated
            decision = past.decision
        self.cluster.takeover = takeover = Takeover(self.cluster, found)
        self.actor.link_address = self._controller_address
        event = await takeover.collect(decision.ledger, decision.phase)
        self.cluster.takeover = None
        return decision.ledger, decision.phase, event

    def _reopen(self) -> tuple[RunDirectory, Past] | None:
        """In the writer's thread; None if this run has nothing on record."""
        storage, name = self.order["storage"], self.order["name"]
        if read_json(open_folder(storage).at(name), "config.json") is None:
            return None
        directory = RunDirectory(storage, name)
        past = read_past(directory.directory, self.order["run_id"], self.limits)
        if past is None:
            directory.close()
            return None
        return directory, past

    async def close(self) -> None:
        await self.cluster.close()
        actors.end(self.cluster.rendezvous)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, end_feed, self.order["run_id"])
        self.writer.executor.shutdown(wait=True)

    # --- workers ------------------------------------------------------------------
    def _spawn(self, worker: int) -> Any:
        is_gpu = self.order["device"] == "cuda"
        return actors.spawn_worker(
            run_id=self.order["run_id"],
            name=worker_name(worker),
            workload=self._workload,
            cpus=self.config.cpus_per_worker,
            gpus=int(is_gpu),
        )

    def _spec_of(self, worker: int) -> WorkerSpec:
        where = self._controller_address, self._place()
        return worker_spec(self.config, self.order, worker, *where, self.cluster.has_formed)

    # --- what goes on record ----------------------------------------------------------
    async def _on_loaded(self, step: int, damaged: list[Damage]) -> str:
        """The run directory stands at `step`; it is created when the first worker is sound."""
        run = asyncio.get_running_loop().run_in_executor
        directory = self.directory
        if directory is None:
            directory = await run(self.writer.executor, self._open_directory)
            self.directory, self.actor.place = directory, directory.place
        if lost_steps := await run(self.writer.executor, directory.roll_back, step):
            self._count_lost(lost_steps)
        if missing := await run(self.writer.executor, directory.skip_to, step):
            self.trouble.hear_missing(*missing)
            self._note("not_on_record", dict(zip(("first", "last"), missing, strict=True)))
        for damage in damaged:
            self.trouble.hear_damaged(damage.step, damage.what)
        if self.checkpoints is None:
            self.checkpoints = self._make_checkpoints(directory)
        await run(self.writer.executor, self.checkpoints.open, step, damaged)
        return directory.place

    def _on_rolled_back(self, step: int) -> None:
        """The members go on from an earlier step, in memory."""
        directory = self.directory
        assert directory is not None

        def roll_back() -> None:  # in the writer's thread
            lost_steps = directory.roll_back(step)
            self._loop.call_soon_threadsafe(self._count_lost, lost_steps)

        self.writer.write(roll_back)

    def _count_lost(self, lost_steps: int) -> None:
        self.lost_steps += lost_steps
        self._journal({"at": self.cluster.now(), "rolled_back": lost_steps})

    def _make_checkpoints(self, directory: RunDirectory) -> Checkpoints:
        return Checkpoints(
            directory,
            keep=self.config.keep,
            about=self.order["content"],
            run_id=self.order["run_id"],
            journal=self._journal_checkpoint,
        )

    def _place(self) -> str:
        """As RunDirectory says it, before there is one."""
        return place_of(self.order["storage"], self.order["name"])

    def _on_publish(self, generation: int, step: int, parts: list[dict[str, Any]]) -> None:
        assert self.checkpoints is not None
        publishing = self.writer.write(self.checkpoints.publish, generation, step, parts)
        publishing.add_done_callback(functools.partial(self._on_published, step))

    def _on_published(self, step: int, publishing: "Future[Any]") -> None:
        error = publishing.exception()
        self.trouble.hear_published(step, "" if error is None else first_line(error))
        self._loop.call_soon_threadsafe(self.cluster.tell_of_save, step, error is None)

    def _on_discard(self, generation: int, step: int) -> None:
        assert self.checkpoints is not None
        self.writer.write(self.checkpoints.discard, generation, step)
        self.cluster.tell_of_save(step, self.checkpoints.committed == step)  # repeated parts

    def _journal_checkpoint(self, fields: dict[str, Any]) -> None:
        """In the writer's thread."""
        assert self.directory is not None
        self.directory.append_journal({"at": self.cluster.now(), "checkpoint": fields})

    def _open_directory(self) -> RunDirectory:
        probe = self.order["probe"]
        if probe is not None and not sees_probe(probe):
            raise WrongInput(
                f"storage {self.order['storage']!r} is not visible from the controller's node; "
                "choose a folder that every node sees, or a URI"
            )
        directory = RunDirectory(self.order["storage"], self.order["name"])
        directory.begin(self.order["content"])
        for line in self._early_lines:
            directory.append_journal(line)
        self._early_lines = []
        return directory

    def _draw(self, metrics: dict[str, Any]) -> None:
        """TensorBoard curves; the writer's thread opens them with the first step."""
        assert self.directory is not None
        if self.curves is None and self.directory.tensorboard is not None:
            self.curves = Curves(self.directory.tensorboard, metrics["step"] - 1)
        if self.curves is not None:
            self.curves.record(metrics)

    def _record(self, event: s.Event | None, decision: Decision) -> None:
        """Every event that mattered and what was decided, with its reason."""
        before, self.decision = self.decision, decision
        self._last_reason = decision.reason or self._last_reason  # the next may come before a look
        if isinstance(event, s.PartFailed):
            self.trouble.hear_save(event.step, event.message)
        if event is not None and before is not None:
            self.account = account(
                self.account, event, before.phase, before.ledger.generation, decision
            )
        if event is not None and not is_news(event, decision):
            return
        self._events += 1
        landmark = None
        if event is None or self._events % LEDGER_EVERY == 0:
            landmark = Landmark(self.order["run_id"], self.account, self.lost_steps)
        self._journal(line_of(event, decision, self.limits, self.cluster.now(), landmark))
        if decision.reason:
            log.info(
                'generation=%d step=%d phase=%s reason="%s"',
                *(decision.ledger.generation, decision.ledger.step),
                *(type(decision.phase).__name__.lower(), decision.reason),
            )
            self._status_due.set()

    def _journal(self, line: dict[str, Any]) -> None:
        if self.directory is None:
            self._early_lines.append(line)
        else:
            self.writer.write(self.directory.append_journal, line)

    def _on_step(self, line: dict[str, Any]) -> None:
        assert self.directory is not None
        self.last_metrics = line["metrics"]
        self.writer.write(self.directory.record_step, line["metrics"], line["samples"])
        self.writer.write(self._draw, line["metrics"])

    def _on_stacks(self, texts: dict[str, str]) -> "Future[Any] | None":
        directory = self.directory
        return None if directory is None else self.writer.write(directory.append_logs, texts)

    def _replace(self, worker: int, why: str) -> None:
        now = self.cluster.now()
        self.cluster.say(s.DrainNotice(worker, why, now + UNLIMITED_S, now))

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        self._journal({"at": self.cluster.now(), kind: fields})

    def _storage_failed(self, cause: str) -> None:
        if self._is_over:  # the files are being closed
            return
        self._journal({"at": self.cluster.now(), "storage": cause})
        if self.config.on_storage_error == "fail":
            self.cluster.cancel("failed", f"storage failed: {cause}")

    # --- status and result ------------------------------------------------------------
    async def _keep_status(self) -> None:
        while not self._is_over:
            if self.directory is not None and self.decision is not None:
                self.writer.hear_uploads(self.directory)
                self.writer.write(self.directory.write_status, self._status(self.decision))
            try:
                await asyncio.wait_for(self._status_due.wait(), STATUS_EVERY_S)
            except TimeoutError:
                continue
            self._status_due.clear()
            await asyncio.sleep(STEP_STATUS_EVERY_S / 5)

    def _status(self, decision: Decision) -> dict[str, Any]:
        watches = (slot.watch for slot in self.cluster.workers.values())
        self.stragglers.look((w.heartbeat for w in watches if w), decision.ledger.step)
        return status_of(
            decision,
            self.cluster.workers,
            steps=self.config.steps,
            committed_checkpoint=self._committed,
            node_ip=self._host,
            reason=self._reason(decision),
        )

    @property
    def _committed(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.checkpoints.committed if self.checkpoints else None

    def _reason(self, decision: Decision) -> str:
        if isinstance(decision.phase, s.Waiting):
            self._last_reason = decision.phase.reason or self._last_reason
        return "; ".join(
            filter(None, (self._last_reason, self.stragglers.reason, self.trouble.now))
        )

    _last_reason = ""

    def _result(self, finished: s.Finished) -> dict[str, Any]:
        assert self.decision is not None
        said = (self.last_metrics.get("loss"), self.lost_steps)
        return result_of(finished, self.decision, self.account, *said)

    async def _close_files(self, result: dict[str, Any]) -> None:
        directory, decision = self.directory, self.decision
        if directory is None or decision is None:
            return
        self._note("own_s", self.stragglers.own_s)
        self.writer.write(
            lambda: directory.write_status(self._status(decision))
        )  # after publishing
        self.writer.write(directory.write_result, result)
        self.writer.write(lambda: self.curves.close() if self.curves is not None else None)
        self.writer.write(directory.close)
        await asyncio.get_running_loop().run_in_executor(None, self.writer.executor.shutdown)
