"""`Recorder`: what the controller puts on record in the run directory.

Journal, steps, checkpoints, curves and the result. What is decided is elastic/control's, how files
are written elastic/store's, in which thread elastic/controller/writer.py's.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from elastic.control import events as e
from elastic.control.accounting import account, open_account
from elastic.control.replay import is_news
from elastic.control.state import Decision, Limits
from elastic.controller.curves import Curves
from elastic.controller.decision_log import DecisionLog, Landmark, line_of, read_past
from elastic.controller.publisher import Checkpoints, Publisher
from elastic.controller.writer import Writer
from elastic.driver.resume import is_script
from elastic.observe.anatomy import SharesByStep
from elastic.protocol.encoding import encode
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import worker_name
from elastic.protocol.messages.to_controller import (
    Fingerprint,
    Planned,
    ScriptLevel,
    ScriptSteps,
)
from elastic.protocol.step_record import NONE_APPLIED, OF_OPTIMIZER, AppliedRecord, StepRecord
from elastic.store.before import Before, look_at
from elastic.store.catalogue import Damage
from elastic.store.files import (
    first_line,
    open_folder,
    place_of,
    reach_folder,
    read_json,
    sees_probe,
    write_json,
)
from elastic.store.remote import AWAY_PAUSES_S, StoreAway, patiently, shown_uri
from elastic.store.run_directory import RunDirectory, without
from elastic.store.script_directory import ScriptDirectory

T = TypeVar("T")
LEDGER_EVERY = 1000
"""Events between two journal lines that hold the whole ledger."""


class Recorder:
    """Owns the run directory. It shows the run from its start on, but until the first worker is
    sound the run may come to nothing: then everything is put back as it was."""

    def __init__(
        self,
        order: dict[str, Any],
        limits: Limits,
        *,
        now: Callable[[], float],
        fail: Callable[[str], None],
        tell_of_save: Callable[[int, bool], None],
        pauses_s: Sequence[float] = AWAY_PAUSES_S,
    ) -> None:
        """now: Unix time. fail: end the run, for a reason. tell_of_save: the workers learn whether
        the checkpoint of a step is published. pauses_s: between tries, while storage is away."""
        self.order, self.limits = order, limits
        self._now, self._fail = now, fail
        self.place = place_of(order["storage"], order["name"])
        """The run directory, whether it exists already or not."""
        self.directory: RunDirectory | None = None
        self._before: Before | None = None
        """What the run directory held when it was opened; None once a worker was sound."""
        self._curves: Curves | None = None
        self._shares = SharesByStep()
        self.writer = Writer(self._storage_failed, fail)
        self.trouble = self.writer.trouble
        self.publisher = Publisher(self.writer, tell_of_save)
        self.account = open_account(now())
        self.lost_steps = 0
        self.last_metrics: dict[str, Any] = {}
        self.planned: Planned | None = None
        """How members share the model, as they said last."""
        self.level = level_at_start(order["content"])
        """At which level a script runs, as its workers said last; None where none does."""
        self._events = 0
        self._early_lines: list[dict[str, Any]] = []
        self._pauses_s = pauses_s
        self._going_back: list[int] = []
        """Steps that the writer's thread has yet to go back to."""
        self._told_step = 0
        """The last one that the writer's thread was told of."""
        self._opening = asyncio.Lock()
        self._closing = threading.Event()

    # --- the run directory --------------------------------------------------------------
    async def open(self) -> str:
        """Make the run directory, before any worker has started: status and journal are there."""
        async with self._opening:
            await self._open()
        return self.place

    async def open_at(self, step: int, damaged: list[Damage]) -> str:
        """The run directory stands at `step`: a worker is sound, and the run is there to stay.

        A store that is away is waited for at the start and for damaged checkpoints, which must be
        aside before others are written: StoreAway in the end. A run that goes back waits for none.
        """
        for damage in damaged:
            self.trouble.hear_damaged(damage.step, damage.what)
        async with self._opening:  # the next worker may have started before it ends
            if self.checkpoints is None:
                return await self._open_first(step, damaged)
        self.roll_back(step)
        self.writer.write(self.checkpoints.stand_at, step)
        if damaged or not self.checkpoints.is_open:
            await self._run(self.checkpoints.open, step, damaged, self._ask)
        return self.place

    async def _open(self) -> RunDirectory:
        if self.directory is None:
            self.directory = directory = cast(RunDirectory, await self._run(self._open_directory))
            self._told_step = directory.last_step
            early_lines, self._early_lines = self._early_lines, []
            for line in early_lines:
                self._journal(line)
        return self.directory

    async def _open_first(self, step: int, damaged: list[Damage]) -> str:
        checkpoints = self._make_checkpoints(await self._open())
        await self._run(self._go_back, step)
        self._count_from(step)
        await self._run(checkpoints.open, step, damaged, self._ask)
        self.publisher.checkpoints, self._before = checkpoints, None
        return self.place

    async def _run(self, function: Any, *arguments: Any) -> Any:
        """In the writer's thread, until it is done."""
        self.writer.flush()
        run = asyncio.get_running_loop().run_in_executor
        return await run(self.writer.executor, function, *arguments)

    def _ask(self, read: Callable[[], T]) -> T:
        """In the writer's thread: as patiently as the workers, until the run ends."""
        try:
            return patiently(read, self._rest, self._pauses_s)
        except OSError as error:
            raise StoreAway(
                f"storage failed: {shown_uri(self.place)} cannot be used now: {first_line(error)}; "
                "start the same run again when it can"
            ) from error

    def _rest(self, pause_s: float) -> None:
        if self._closing.wait(pause_s):
            raise StoreAway("nobody waits for it any more")

    def _open_directory(self) -> RunDirectory:
        """In the writer's thread."""
        probe = self.order["probe"]
        if probe is not None and not self._ask(functools.partial(sees_probe, probe)):
            where = shown_uri(self.order["storage"])
            raise WrongInput(
                f"storage {where!r} is not visible from the controller's node; "
                "choose a folder that every node sees, or a URI"
            )
        storage, name, launch = self.order["storage"], self.order["name"], self.order["run_id"]
        before = self._ask(lambda: look_at(reach_folder(storage).at(name)))
        directory = self._ask(lambda: self._kind(storage, name, launch=launch))
        self._before = before
        self._ask(functools.partial(directory.begin, self.order["content"]))
        return directory

    async def reopen(self) -> DecisionLog | None:
        """Go on with what this run's last controller has put on record; None if that is nothing."""
        run = asyncio.get_running_loop().run_in_executor
        opened = await run(self.writer.executor, self._reopen)
        if opened is None:
            return None
        self.directory, past = opened
        self._told_step = self.directory.last_step
        checkpoints = self.publisher.checkpoints = self._make_checkpoints(self.directory)
        has_formed = past.decision.ledger.num_generations > 0  # else it has perhaps not opened them
        take_over = functools.partial(checkpoints.take_over, is_open=has_formed)
        await run(self.writer.executor, take_over)
        self.account, self.lost_steps = past.account, past.lost_steps
        self.last_metrics, self.planned = past.last_metrics, past.planned
        self.level = past.level or self.level
        return past

    def _reopen(self) -> tuple[RunDirectory, DecisionLog] | None:
        """In the writer's thread."""
        storage, name = self.order["storage"], self.order["name"]
        content = read_json(open_folder(storage).at(name), "config.json")
        if content is None:
            return None
        directory = self._kind(storage, name, launch=self.order["run_id"])
        past = read_past(directory.directory, self.order["run_id"], self.limits, directory.RECORD)
        if past is None:
            directory.close()
            return None
        self.order["content"] = content
        return directory, past

    @property
    def _kind(self) -> type[RunDirectory]:
        return ScriptDirectory if is_script(self.order["content"]) else RunDirectory

    def _storage_failed(self, cause: str) -> None:
        if self._closing.is_set():
            return
        self._journal({"at": self._now(), "storage": cause})
        if self.order["config"].checkpointing.on_storage_error == "fail":
            self._fail(f"storage failed: {cause}")

    async def close(self, status: Callable[[], dict[str, Any]], result: dict[str, Any]) -> None:
        """A run that came to nothing leaves nothing, unless its driver is gone and nobody else
        would tell. status: asked for once everything before is written."""
        self._closing.set()
        async with self._opening:  # else its end would be too late to be undone
            directory = self.directory
        if directory is None:
            return
        if self._before is not None and not self.order["detach"]:
            self.directory = None
            self.writer.write(directory.undo, self._before)
            await asyncio.get_running_loop().run_in_executor(None, self.writer.executor.shutdown)
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
            self.account = account(self.account, event, before, decision)
        if event is not None and not is_news(event, decision):
            return
        self._events += 1
        landmark = None
        if event is None or self._events % LEDGER_EVERY == 0:
            landmark = Landmark(
                self.order["run_id"], self.account, self.lost_steps, self.planned, self.level
            )
        is_plain_step = isinstance(event, e.Committed | e.Stepped) and not decision.commands
        self._journal(line_of(event, decision, self.limits, at, landmark), may_wait=is_plain_step)

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        self._journal({"at": self._now(), kind: fields})

    def record_planned(self, said: Planned) -> None:
        """Also in config.json, what each block costs."""
        before, self.planned = self.planned, said
        self.note("planned", encode(said))
        costs = dict(zip(said.blocks, said.costs, strict=True))
        is_known = before is not None and (before.blocks, before.costs) == (said.blocks, said.costs)
        if costs and not is_known:
            self._add_to_config(block_costs=costs)

    def record_fingerprint(self, said: Fingerprint) -> None:
        """In config.json, as of the machine on which the run has begun: it is resumed on such."""
        if "fingerprint" not in self.order["content"]:
            self._add_to_config(fingerprint=dict(said.facts))

    def _add_to_config(self, **found: Any) -> None:
        self.order["content"] = content = {**self.order["content"], **found}
        if self.directory is not None:
            self.writer.write(write_config, self.directory, content)

    def record_level(self, said: ScriptLevel) -> None:
        self.level = said
        self.note("level", encode(said))

    def _journal(self, line: dict[str, Any], *, may_wait: bool = False) -> None:
        """may_wait: with the steps, of which no decision came."""
        if self.directory is None:
            self._early_lines.append(line)
        elif may_wait:
            self.writer.write_soon(self.directory.append_journal, line)
        else:
            self.writer.write(self.directory.append_journal, line)

    def write_status(self, status: dict[str, Any]) -> None:
        if self.directory is not None:
            self.writer.hear_uploads(self.directory)
            self.writer.write(self._write_status, self.directory, status)

    def _write_status(self, directory: RunDirectory, status: dict[str, Any]) -> None:
        """In the writer's thread."""
        if self._curves is not None:
            self._curves.flush_now_and_then()
        directory.write_status(status)

    def keep_stacks(self, texts: dict[str, str]) -> "Future[Any] | None":
        directory = self.directory
        return None if directory is None else self.writer.write(directory.append_logs, texts)

    # --- steps --------------------------------------------------------------------------
    def record_step(self, step: StepRecord) -> None:
        assert self.directory is not None
        metrics, samples = step.metrics.to_line(), step.samples.to_line()
        if self.level is not None:
            metrics = without(metrics, OF_OPTIMIZER)
        self.last_metrics = metrics
        self._told_step = max(self._told_step, step.step)
        self.writer.write_soon(self._record_step, self.directory, metrics, samples)

    def _record_step(
        self, directory: RunDirectory, metrics: dict[str, Any], samples: dict[str, Any]
    ) -> None:
        """In the writer's thread. Curves are drawn of what storage does not take, too."""
        try:
            directory.record_step(metrics, samples)
        finally:
            if not isinstance(directory, ScriptDirectory):
                self._draw(directory, metrics)

    def record_applied(self, said: ScriptSteps) -> None:
        """Steps of a script's optimizers."""
        if isinstance(self.directory, ScriptDirectory):
            self.writer.write_soon(self._record_applied, self.directory, said)

    def _record_applied(self, directory: ScriptDirectory, said: ScriptSteps) -> None:
        """In the writer's thread."""
        for step in directory.record_applied(said.call, said.base, said.steps):
            self._draw(directory, step.to_line())

    @property
    def safe_applied(self) -> AppliedRecord:
        """Steps of a script's whose record this process's death cannot take along."""
        if isinstance(self.directory, ScriptDirectory):
            return self.directory.safe_applied
        return NONE_APPLIED

    def record_anatomy(self, worker: int, rows: tuple[dict[str, Any], ...]) -> None:
        """Where the time of some steps went, on one worker."""
        if self.directory is not None:
            lines = [{"worker": worker_name(worker), **row} for row in rows]
            self.writer.write_soon(self._record_anatomy, self.directory, lines)

    def _record_anatomy(self, directory: RunDirectory, lines: list[dict[str, Any]]) -> None:
        """In the writer's thread. Curves are of whole steps: of all ranks."""
        try:
            directory.append_anatomy(lines)
        finally:
            for found in self._shares.hear(lines):
                if self._curves is not None:
                    self._curves.record_shares(found)

    async def settle(self) -> None:
        """Until everything that was told so far, checkpoints too, is in the run directory."""
        await self.writer.settle()

    @property
    def safe_step(self) -> int:
        """Steps whose record this process's death cannot take along."""
        return min((self.directory.safe_step, *self._going_back)) if self.directory else 0

    def roll_back(self, step: int) -> None:
        """The members go on from an earlier step."""
        self._going_back.append(step)
        going_back = self.writer.write(self._go_back, step)
        going_back.add_done_callback(lambda _: self._going_back.remove(step))
        self._count_from(step)

    def _go_back(self, step: int) -> None:
        """In the writer's thread: the record stands at `step`."""
        assert self.directory is not None
        self.directory.roll_back(step)
        self.directory.skip_to(step)

    def _count_from(self, step: int) -> None:
        """The next step that is recorded follows `step`. What that means for the steps that were is
        known, and in the result, however long the writer's thread takes."""
        last, self._told_step = self._told_step, step
        if step < last:
            self.lost_steps += last - step
            self._journal({"at": self._now(), "rolled_back": last - step})
        elif step > last:
            self.trouble.hear_missing(last + 1, step)
            self.note("not_on_record", {"first": last + 1, "last": step})

    def _draw(self, directory: RunDirectory, metrics: dict[str, Any]) -> None:
        """TensorBoard curves, which the first step opens."""
        if self._curves is None and directory.tensorboard is not None:
            self._curves = Curves(directory.tensorboard, metrics["step"] - 1)
        if self._curves is not None:
            self._curves.record(metrics)

    # --- checkpoints --------------------------------------------------------------------
    @property
    def checkpoints(self) -> Checkpoints | None:
        return self.publisher.checkpoints

    @property
    def committed(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.checkpoints.committed if self.checkpoints else None

    def _make_checkpoints(self, directory: RunDirectory) -> Checkpoints:
        return Checkpoints(
            directory,
            keep=self.order["config"].checkpointing.keep,
            about=self.order["content"],
            run_id=self.order["run_id"],
            journal=self._journal_checkpoint,
        )

    def _journal_checkpoint(self, fields: dict[str, Any]) -> None:
        """In the writer's thread."""
        assert self.directory is not None
        self.directory.append_journal({"at": self._now(), "checkpoint": fields})


def write_config(directory: RunDirectory, content: dict[str, Any]) -> None:
    """Anew, unless another launch writes the run by now."""
    if not directory.taken_by:
        write_json(directory.folder, "config.json", content)


def level_at_start(content: dict[str, Any]) -> ScriptLevel | None:
    """Until a worker has said more. content: of config.json."""
    return ScriptLevel(0, 0, "the script has not been called yet") if is_script(content) else None
