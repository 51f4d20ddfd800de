"""The run inside the controller's process: cluster, decisions, journal and files put together.

`supervise` is hosted by the controller actor. The decisions are elastic/control's, the hands are
elastic/on_ray/cluster.py's, the files are elastic/store's.
"""

import asyncio
import functools
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic import controller
from elastic.checkpoints import Checkpoints
from elastic.config import RunConfig
from elastic.control import state as s
from elastic.control.accounting import account, open_account
from elastic.control.replay import Entry, Started, is_news
from elastic.control.state import Decision
from elastic.curves import Curves
from elastic.on_ray import actors
from elastic.on_ray.cluster import RayCluster
from elastic.on_ray.host import Host
from elastic.protocol.encoding import encode
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.protocol.mesh import is_sharded
from elastic.protocol.seams import WorkerSpec
from elastic.store.catalogue import Damage
from elastic.store.files import sees_probe
from elastic.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from elastic.on_ray.actors import ControllerActor

LEDGER_EVERY = 1000
"""Events between two journal lines that hold the whole ledger."""
STATUS_EVERY_S = 0.5
STEP_STATUS_EVERY_S = 0.1
UNLIMITED_S = 24 * 3600.0

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
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._status_due = asyncio.Event()
        self._events = 0
        self._is_over = False
        self._storage_error = ""
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
                on_loaded=self._on_loaded,
                on_publish=self._on_publish,
                on_discard=self._on_discard,
                on_step=self._on_step,
                on_evaluation=self._on_evaluation,
            ),
        )
        self.account = open_account(self.cluster.now())
        self.decision: Decision | None = None

    async def run(self) -> dict[str, Any]:
        self._loop = asyncio.get_running_loop()
        self._controller_address = await self.cluster.links.open(self._host)
        self.actor.on_stop = self.cluster.request_stop
        self.actor.on_end = functools.partial(self.cluster.cancel, "stopped")
        status = asyncio.create_task(self._keep_status())
        status.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            finished = await controller.control(
                self.cluster, self.limits, self._record, self.cluster.now()
            )
        except Exception as error:  # whatever it is, the run ends with a result
            log.exception("the controller failed")
            finished = s.Finished("failed", f"internal error: {error!r}")
        finally:
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
        }

    async def close(self) -> None:
        await self.cluster.close()
        actors.end(self.cluster.rendezvous)
        self._writer.shutdown(wait=True)

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
        config = self.config
        return WorkerSpec(
            worker=worker,
            run_id=self.order["run_id"],
            token=self.order["token"],
            controller=self._controller_address,
            device=self.order["device"],
            num_threads=config.cpus_per_worker,
            folder=self.order["folder"],
            steps=config.steps,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            parallel=config.parallel,
            reduction=config.reduction,
            clip_norm=config.clip_norm,
            seed=config.seed,
            eval_every=config.eval_every,
            checkpoint_every=config.checkpoint_every,
            has_checkpoints=config.storage is not None or config.checkpoint_every is not None,
            max_nonfinite=config.faults.max_nonfinite,
            detect_s=config.detect_s,
            heartbeat_s=heartbeat_s(config),
            join_timeout_s=self.limits.join_timeout_s,
            operation_timeout_s=100 * (config.detect_s or UNLIMITED_S / 100),
            lease_s=10 * (config.detect_s or 60.0),
        )

    # --- what goes on record ----------------------------------------------------------
    async def _on_loaded(self, step: int, damaged: list[Damage]) -> str:
        """The run directory stands at `step`; it is created when the first worker is sound."""
        run = asyncio.get_running_loop().run_in_executor
        directory = self.directory
        if directory is None:
            directory = await run(self._writer, self._open_directory)
            self.directory, self.actor.place = directory, directory.place
        self.lost_steps += await run(self._writer, directory.roll_back, step)
        if self.checkpoints is None:
            self.checkpoints = Checkpoints(
                directory,
                keep=self.config.keep,
                about=self.order["content"],
                journal=self._journal_checkpoint,
            )
            await run(self._writer, self.checkpoints.open, step, damaged)
        return directory.place

    def _place(self) -> str:
        """As RunDirectory says it, before there is one."""
        storage, name = self.order["storage"], self.order["name"]
        return f"{str(storage).rstrip('/')}/{name}"

    def _on_publish(self, generation: int, step: int, parts: list[dict[str, Any]]) -> None:
        assert self.checkpoints is not None
        publishing = self._write(self.checkpoints.publish, generation, step, parts)
        publishing.add_done_callback(functools.partial(self._on_published, step))

    def _on_published(self, step: int, publishing: "Future[Any]") -> None:
        is_published = publishing.exception() is None
        self._loop.call_soon_threadsafe(self.cluster.tell_of_save, step, is_published)

    def _on_discard(self, generation: int, step: int) -> None:
        assert self.checkpoints is not None
        self._write(self.checkpoints.discard, generation, step)
        self.cluster.tell_of_save(step, False)

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
        if event is not None and before is not None:
            self.account = account(
                self.account, event, before.phase, before.ledger.generation, decision
            )
        if event is not None and not is_news(event, decision):
            return
        self._events += 1
        ledger = decision.ledger
        if event is None:
            entry = Started(self.limits, self.cluster.now(), decision.commands, decision.reason)
        else:
            is_due = self._events % LEDGER_EVERY == 0
            entry = Entry(
                event,
                decision.commands,
                decision.reason,
                ledger if is_due else None,
                decision.phase if is_due else None,
            )
        self._journal(
            {
                "at": event.at if event is not None else self.cluster.now(),
                "phase": type(decision.phase).__name__.lower(),
                "generation": ledger.generation,
                "step": ledger.step,
                "entry": encode(entry),
            }
        )
        if decision.reason:
            log.info(
                'generation=%d step=%d phase=%s reason="%s"',
                ledger.generation,
                ledger.step,
                type(decision.phase).__name__.lower(),
                decision.reason,
            )
            self._status_due.set()

    def _journal(self, line: dict[str, Any]) -> None:
        if self.directory is None:
            self._early_lines.append(line)
        else:
            self._write(self.directory.append_journal, line)

    def _on_step(self, line: dict[str, Any]) -> None:
        assert self.directory is not None
        self.last_metrics = line["metrics"]
        self._write(self.directory.record_step, line["metrics"], line["samples"])
        self._write(self._draw, line["metrics"])

    def _on_evaluation(self, values: dict[str, Any]) -> None:
        self._journal({"at": self.cluster.now(), "evaluation": values})

    def _write(self, function: Any, *arguments: Any) -> "Future[Any]":
        """In the writer's thread: a decision never waits for storage."""
        future = self._writer.submit(function, *arguments)
        future.add_done_callback(self._on_written)
        return future

    def _on_written(self, future: "Future[Any]") -> None:
        error = future.exception()
        if isinstance(error, ValueError | AssertionError):  # a broken invariant of ours
            self._loop.call_soon_threadsafe(self.cluster.cancel, "failed", f"record: {error}")
        elif error is not None and not self._storage_error:
            self._storage_error = f"{type(error).__name__}: {error}"
            log.error('storage reason="%s"', self._storage_error)
            if self.config.on_storage_error == "fail":
                self._loop.call_soon_threadsafe(
                    self.cluster.cancel, "failed", f"storage failed: {self._storage_error}"
                )

    # --- status and result ------------------------------------------------------------
    async def _keep_status(self) -> None:
        while not self._is_over:
            if self.directory is not None and self.decision is not None:
                self._write(self.directory.write_status, self._status(self.decision))
            try:
                await asyncio.wait_for(self._status_due.wait(), STATUS_EVERY_S)
            except TimeoutError:
                continue
            self._status_due.clear()
            await asyncio.sleep(STEP_STATUS_EVERY_S / 5)

    def _status(self, decision: Decision) -> dict[str, Any]:
        phase, ledger = decision.phase, decision.ledger
        members = phase.membership.workers if isinstance(phase, s.Active) else ()
        ranks = {worker: rank for rank, worker in enumerate(members)}
        rows: list[dict[str, Any]] = [
            {
                "id": worker_name(w),
                "rank": ranks.get(w),
                "node_id": r.node_id or None,
                "node_ip": r.node_ip or None,
                "pid": r.pid or None,
                "device": r.device or None,
                "state": r.shown_state,
                "step": max(r.step, ledger.step) if w in ranks else r.step,
            }
            for w, r in sorted(self.cluster.workers.items())
        ]
        is_starting = isinstance(phase, s.Waiting) and ledger.generation == 0
        return {
            "phase": "starting" if is_starting else type(phase).__name__.lower(),
            "generation": ledger.generation,
            "world_size": len(members),
            "step": ledger.step,
            "steps": self.config.steps,
            "committed_checkpoint": self.checkpoints.committed if self.checkpoints else None,
            "workers": sorted((r for r in rows if r["rank"] is not None), key=lambda r: r["rank"]),
            "standby": [r for r in rows if r["rank"] is None],
            "controller": {"pid": os.getpid(), "node_ip": self._host},
            "reason": self._reason(decision),
        }

    def _reason(self, decision: Decision) -> str:
        if decision.reason:
            self._last_reason = decision.reason
        if isinstance(decision.phase, s.Waiting):
            self._last_reason = decision.phase.reason or self._last_reason
        return self._last_reason

    _last_reason = ""

    def _result(self, finished: s.Finished) -> dict[str, Any]:
        assert self.decision is not None
        return {
            "outcome": finished.outcome,
            "steps": self.decision.ledger.step,
            "loss": self.last_metrics.get("loss"),
            "weights_sha256": finished.weights_sha256,
            "generations": self.decision.ledger.generation,
            "lost_steps": self.lost_steps,
            "goodput": self.account.goodput,
            "badput": self.account.badput_s,
            "recoveries": [asdict(r) for r in self.account.recoveries],
        }

    async def _close_files(self, result: dict[str, Any]) -> None:
        directory, decision = self.directory, self.decision
        if directory is None or decision is None:
            return
        self._write(lambda: directory.write_status(self._status(decision)))  # after publishing
        self._write(directory.write_result, result)
        self._write(lambda: self.curves.close() if self.curves is not None else None)
        self._write(directory.close)
        await asyncio.get_running_loop().run_in_executor(None, self._writer.shutdown)


def limits_of(config: RunConfig) -> s.Limits:
    detect_s = config.detect_s
    return s.Limits(
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        standby=config.standby,
        steps=config.steps,
        max_failures=config.max_failures,
        join_timeout_s=10 * detect_s if detect_s else 600.0,
        end_timeout_s=100 * detect_s if detect_s else UNLIMITED_S,
        confirm_timeout_s=detect_s or 30.0,
        must_save=config.on_storage_error == "fail",
        is_sharded=is_sharded(config.parallel),
    )


def heartbeat_s(config: RunConfig) -> float:
    return min(0.5, (config.detect_s or 3.0) / 6)
