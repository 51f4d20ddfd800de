"""`Recorder`: what the controller puts on record in the run directory.

Journal, steps, checkpoints, curves and the result. What is decided is elastic/control's, how files
are written elastic/store's, in which thread elastic/writer.py's.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from elastic.checkpoints import Checkpoints
from elastic.commands.curves import Curves
from elastic.control import events as e
from elastic.control.accounting import account, open_account
from elastic.control.replay import is_news
from elastic.control.state import Decision, Limits
from elastic.past import Landmark, Past, line_of, read_past
from elastic.protocol.errors import WrongInput
from elastic.store.catalogue import Damage
from elastic.store.files import first_line, open_folder, place_of, read_json, sees_probe
from elastic.store.run_directory import RunDirectory
from elastic.writer import Writer

LEDGER_EVERY = 1000
"""Events between two journal lines that hold the whole ledger."""


class Recorder:
    """Owns the run directory, which is made for the first sound worker: lines wait until then."""

    def __init__(
        self,
        order: dict[str, Any],
        limits: Limits,
        *,
        now: Callable[[], float],
        fail: Callable[[str], None],
        tell_of_save: Callable[[int, bool], None],
    ) -> None:
        """now: Unix time. fail: end the run, for a reason. tell_of_save: the workers learn whether
        the checkpoint of a step is published."""
        self.order, self.limits = order, limits
        self._now, self._fail, self._tell_of_save = now, fail, tell_of_save
        self.place = place_of(order["storage"], order["name"])
        """The run directory, whether it exists already or not."""
        self.directory: RunDirectory | None = None
        self.checkpoints: Checkpoints | None = None
        self._curves: Curves | None = None
        self.writer = Writer(self._storage_failed, fail)
        self.trouble = self.writer.trouble
        self.account = open_account(now())
        self.lost_steps = 0
        self.last_metrics: dict[str, Any] = {}
        self._events = 0
        self._early_lines: list[dict[str, Any]] = []
        self._is_closing = False

    # --- the run directory --------------------------------------------------------------
    async def open_at(self, step: int, damaged: list[Damage]) -> str:
        """The run directory stands at `step`; it is created when the first worker is sound."""
        run = asyncio.get_running_loop().run_in_executor
        directory = self.directory
        if directory is None:
            directory = await run(self.writer.executor, self._open_directory)
            self.directory = directory
        if lost_steps := await run(self.writer.executor, directory.roll_back, step):
            self._count_lost(lost_steps)
        if missing := await run(self.writer.executor, directory.skip_to, step):
            self.trouble.hear_missing(*missing)
            self.note("not_on_record", dict(zip(("first", "last"), missing, strict=True)))
        for damage in damaged:
            self.trouble.hear_damaged(damage.step, damage.what)
        if self.checkpoints is None:
            self.checkpoints = self._make_checkpoints(directory)
        await run(self.writer.executor, self.checkpoints.open, step, damaged)
        return directory.place

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

    async def reopen(self) -> Past | None:
        """Go on with what this run's last controller has put on record; None if that is nothing."""
        run = asyncio.get_running_loop().run_in_executor
        opened = await run(self.writer.executor, self._reopen)
        if opened is None:
            return None
        self.directory, past = opened
        self.checkpoints = self._make_checkpoints(self.directory)
        await run(self.writer.executor, self.checkpoints.take_over)
        self.account, self.lost_steps = past.account, past.lost_steps
        self.last_metrics = past.last_metrics
        return past

    def _reopen(self) -> tuple[RunDirectory, Past] | None:
        """In the writer's thread."""
        storage, name = self.order["storage"], self.order["name"]
        if read_json(open_folder(storage).at(name), "config.json") is None:
            return None
        directory = RunDirectory(storage, name)
        past = read_past(directory.directory, self.order["run_id"], self.limits)
        if past is None:
            directory.close()
            return None
        return directory, past

    def _storage_failed(self, cause: str) -> None:
        if self._is_closing:
            return
        self._journal({"at": self._now(), "storage": cause})
        if self.order["config"].on_storage_error == "fail":
            self._fail(f"storage failed: {cause}")

    async def close(self, status: Callable[[], dict[str, Any]], result: dict[str, Any]) -> None:
        """status: asked for once everything before is written."""
        self._is_closing = True
        directory = self.directory
        if directory is None:
            return
        self.writer.write(lambda: directory.write_status(status()))
        self.writer.write(directory.write_result, result)
        self.writer.write(lambda: self._curves.close() if self._curves is not None else None)
        self.writer.write(directory.close)
        await asyncio.get_running_loop().run_in_executor(None, self.writer.executor.shutdown)

    # --- lines --------------------------------------------------------------------------
    def record(self, event: e.Event | None, before: Decision | None, decision: Decision) -> None:
        """Every event that mattered and what was decided, with its reason."""
        at = self._now()
        if event is None:  # the run starts here, for whoever reads the journal, too
            self.account = open_account(at)
        if isinstance(event, e.PartFailed):
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
        self._journal(line_of(event, decision, self.limits, at, landmark))

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        self._journal({"at": self._now(), kind: fields})

    def _journal(self, line: dict[str, Any]) -> None:
        if self.directory is None:
            self._early_lines.append(line)
        else:
            self.writer.write(self.directory.append_journal, line)

    def write_status(self, status: dict[str, Any]) -> None:
        if self.directory is not None:
            self.writer.hear_uploads(self.directory)
            self.writer.write(self.directory.write_status, status)

    def keep_stacks(self, texts: dict[str, str]) -> "Future[Any] | None":
        directory = self.directory
        return None if directory is None else self.writer.write(directory.append_logs, texts)

    # --- steps --------------------------------------------------------------------------
    def record_step(self, line: dict[str, Any]) -> None:
        assert self.directory is not None
        self.last_metrics = line["metrics"]
        self.writer.write(self.directory.record_step, line["metrics"], line["samples"])
        self.writer.write(self._draw, line["metrics"])

    @property
    def safe_step(self) -> int:
        """Steps whose record this process's death cannot take along."""
        return self.directory.safe_step if self.directory else 0

    def roll_back(self, step: int) -> None:
        """The members go on from an earlier step, in memory."""
        directory, loop = self.directory, self.writer.loop
        assert directory is not None

        def roll_back() -> None:  # in the writer's thread
            lost_steps = directory.roll_back(step)
            loop.call_soon_threadsafe(self._count_lost, lost_steps)

        self.writer.write(roll_back)

    def _count_lost(self, lost_steps: int) -> None:
        self.lost_steps += lost_steps
        self._journal({"at": self._now(), "rolled_back": lost_steps})

    def _draw(self, metrics: dict[str, Any]) -> None:
        """TensorBoard curves; the writer's thread opens them with the first step."""
        assert self.directory is not None
        if self._curves is None and self.directory.tensorboard is not None:
            self._curves = Curves(self.directory.tensorboard, metrics["step"] - 1)
        if self._curves is not None:
            self._curves.record(metrics)

    # --- checkpoints --------------------------------------------------------------------
    @property
    def committed(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.checkpoints.committed if self.checkpoints else None

    def _make_checkpoints(self, directory: RunDirectory) -> Checkpoints:
        return Checkpoints(
            directory,
            keep=self.order["config"].keep,
            about=self.order["content"],
            run_id=self.order["run_id"],
            journal=self._journal_checkpoint,
        )

    def _journal_checkpoint(self, fields: dict[str, Any]) -> None:
        """In the writer's thread."""
        assert self.directory is not None
        self.directory.append_journal({"at": self._now(), "checkpoint": fields})

    def publish(self, generation: int, step: int, parts: list[dict[str, Any]]) -> None:
        assert self.checkpoints is not None
        publishing = self.writer.write(self.checkpoints.publish, generation, step, parts)
        publishing.add_done_callback(functools.partial(self._on_published, step))

    def _on_published(self, step: int, publishing: "Future[Any]") -> None:
        error = publishing.exception()
        self.trouble.hear_published(step, "" if error is None else first_line(error))
        self.writer.loop.call_soon_threadsafe(self._tell_of_save, step, error is None)

    def discard(self, generation: int, step: int) -> None:
        assert self.checkpoints is not None
        self.writer.write(self.checkpoints.discard, generation, step)
        self._tell_of_save(step, self.checkpoints.committed == step)  # repeated parts
