"""A run of real workers under the shipped decisions, links and stores, without Ray: processes come
from the fork server of the ranks' tests, and their end is what the operating system says."""

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cloudpickle

from elastic.config import RunConfig
from elastic.control import commands as c
from elastic.control import events as e
from elastic.control.translation import event_of, interruption
from elastic.controller.loop import control
from elastic.controller.settings import limits_of, worker_spec
from elastic.on_ray.links import LinkServer
from elastic.on_ray.record.progress import Progress
from elastic.protocol.messages import to_controller as r
from elastic.protocol.messages import to_worker as t
from elastic.store.applied_steps import AppliedSteps
from tests.control.fake_record import FakeRecord
from tests.workers.forking import forking
from workers.distributed.rendezvous import StoreServer
from workers.scripts.workload import ScriptWorkload

TOKEN = "secret"


def work(spec: Any, pickled: bytes, environment: dict[str, str]) -> None:
    """The main function of a worker's process."""
    from workers.worker import Around, Worker

    os.environ.update(environment)
    os.chdir(environment["HERE"])
    around = Around(
        node_id="node",
        find_controller=lambda: None,
        open_feed=cast(Any, lambda *_: None),
        enter_child=lambda: None,
        drain_node=lambda seconds: None,
    )
    Worker(spec, pickled, around).run()


class LocalRun:
    """`start` it, harm it, and `wait` for its end. The loop is a thread's."""

    def __init__(self, loop: Any, place: Path, workers: int, *, least: int | None = None) -> None:
        """loop: what each worker runs. least: it goes on with so many, once it has begun."""
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text("{}")
        self.config = RunConfig(
            workers=workers, steps=10**9, global_batch=workers, micro_batch=1, device="cpu",
            storage=str(place.parent), name=place.name, max_failures=10**6,
        )  # fmt: skip
        self._least = least
        self._pickled = cloudpickle.dumps((ScriptWorkload(workers), loop))
        self.pids: dict[int, int] = {}
        self._processes: dict[int, Any] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self.members: tuple[int, ...] = ()
        self._store: StoreServer | None = None
        self._untold = False
        self.decisions: list[str] = []
        self.failure = ""
        self.outcome = ""
        self.level: r.ScriptLevel | None = None
        self.record = FakeRecord()
        self._applied = AppliedSteps(place, None, threading.Lock())
        self.can_replace = True
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "LocalRun":
        self._thread.start()
        return self

    def wait(self, timeout_s: float = 120.0) -> str:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), self.decisions[-8:]
        return self.outcome

    def kill(self, worker: int) -> None:
        os.kill(self.pids[worker], signal.SIGKILL)

    # --- the loop's thread ------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.run(self._supervise())

    async def _supervise(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._links = LinkServer(TOKEN, self._hear, lambda *_: None, lambda *_: None)
        self._controller = await self._links.open("127.0.0.1")
        self._progress = Progress(cast(Any, self.record), self._say, time.monotonic)
        try:
            finished = await control(
                self, limits_of(self.config), self._note, time.monotonic()
            )  # fmt: skip
            self.outcome = finished.outcome
        finally:
            for process in self._processes.values():
                process.kill()
            self._links.close()

    def _note(self, event: Any, decision: Any) -> None:
        if decision.reason:
            self.decisions.append(f"{time.time():.3f} {decision.reason}")
        if self._least is not None and type(decision.phase).__name__ == "Running":
            self._say(e.Resized(self._least, self.config.max_workers, time.monotonic()))
            self._least = None

    def _say(self, event: Any) -> None:
        self._events.put_nowait(event)

    async def next_event(self) -> Any:
        try:
            return await asyncio.wait_for(self._events.get(), 0.5)
        except TimeoutError:
            return e.Tick(time.monotonic())

    async def execute(self, command: c.Command) -> None:  # noqa: C901
        match command:
            case c.Spawn(workers):
                for worker in workers:
                    if worker < self.config.max_workers or self.can_replace:
                        self._spawn(worker)
            case c.Load(worker):
                self._links.send(worker, t.Load(str(self.place), self._progress.recorded_step))
            case c.Sync(worker, source):
                self._links.send(worker, t.Sync(source, self._addresses.get(source)))
            case c.Form():
                self._form(command)
            case c.Pause() | c.Checkpoint() | c.Keep() | c.Abort() | c.Recall():
                if isinstance(command, c.Abort | c.Recall):
                    self._progress.commits.give_up(command.membership.generation)
                for rank, worker in enumerate(command.membership.workers):
                    told = interruption(command, rank, is_unheard=self._untold)
                    self._links.send(worker, told)
            case c.Finish(membership, outcome):
                size, step = membership.world_size, self._progress.recorded_step
                for rank, worker in enumerate(membership.workers):
                    told = t.Finish(membership.generation, rank, size, outcome, None, step)
                    self._links.send(worker, told)
            case c.Retire(workers):
                for worker in workers:
                    if worker in self._processes:
                        self._processes.pop(worker).kill()
            case c.Publish(step=step) | c.Discard(step=step):
                for worker in self._processes:
                    self._links.send(worker, t.SaveConcluded(step, isinstance(command, c.Publish)))

    def _spawn(self, worker: int) -> None:
        order = {"run_id": "local", "token": TOKEN, "device": "cpu", "folder": None}
        spec = worker_spec(self.config, order, worker, self._controller, str(self.place))
        spec = replace(spec, host="127.0.0.1", node="node")
        environment = {"HERE": str(self.place)}
        process = forking().Process(target=work, args=(spec, self._pickled, environment))
        process.start()
        self._processes[worker] = process
        threading.Thread(target=self._watch, args=(worker, process), daemon=True).start()

    def _watch(self, worker: int, process: Any) -> None:
        process.join()
        with suppress(RuntimeError):  # the run is over
            self._loop.call_soon_threadsafe(self._on_end, worker, process)

    def _on_end(self, worker: int, process: Any) -> None:
        if self._processes.get(worker) is process:
            del self._processes[worker]
            now = time.monotonic()
            self._links.drop(worker)
            self._say(e.WorkerLost(worker, "process_died", now, now))

    def _form(self, form: c.Form) -> None:
        membership = form.membership
        self.members = membership.workers
        store = None
        if membership.world_size > 1:
            self._store = StoreServer("127.0.0.1")
            store = ("127.0.0.1", self._store.port, self._store.secret)
        self._progress.members = frozenset(membership.workers)
        for rank, worker in enumerate(membership.workers):
            vote, payload = None, b""
            if worker in form.roll_forward:
                vote, payload = self._progress.commits.vote_of(form.step, form.origin)
            told = t.Form(
                generation=membership.generation, rank=rank, world_size=membership.world_size,
                step=form.step, then_pause=form.then_pause, vote=vote, payload=payload,
                recorded_step=self._progress.recorded_step, store=store, evaluation=None,
                holders=(), order=form.order, origin=form.origin,
            )  # fmt: skip
            self._links.send(worker, told)

    def _hear(self, worker: int, report: r.Report) -> None:  # noqa: C901
        match report:
            case r.Introduction():
                step, formed = self._progress.recorded_step, self._progress.commits.formed
                self._links.send(worker, t.Word(step, formed, self._applied.safe))
            case r.Started(process):
                self.pids[worker] = process.pid
                self._addresses[worker] = process.peer_address
                self._links.send(worker, t.LogTo(str(self.place)))
                self._say(e.WorkerStarted(worker, time.monotonic(), "node"))
            case r.Loaded(step, origin=origin):
                self._progress.recorded_step = step
                self._say(e.Loaded(worker, step, time.monotonic(), origin))
            case r.UserFailed(message) | r.WrongInput(message):
                self.failure = message
                self._say(e.UserFailed(worker, message, time.monotonic()))
            case r.Committed():
                self._progress.commits.hear(report)
            case r.Held():
                self._progress.commits.hear_held(report)
            case r.Joined():
                self._progress.hear_joined(report)
                self._say(event_of(worker, report, time.monotonic()))
            case r.Suspended(generation) if self._progress.commits.is_news(generation):
                self._progress.hear_suspended(worker, report)
                self._say(event_of(worker, report, time.monotonic()))
            case r.ScriptLevel():
                self.level = report
            case r.ScriptSteps(call, base, steps):
                self._applied.record(call, base, steps)
            case r.Measured() | r.LastWords() | r.ScriptMove():
                pass
            case _:
                self._say(event_of(worker, cast(Any, report), time.monotonic()))
