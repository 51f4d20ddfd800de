"""What a person sees of a run that goes on: read from its run directory, shown as it changes.

`elastic run` and `elastic watch` call `Progress` again and again; it decides
when there is something to show. A look reads what is new and no history: a run may have a million
steps.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from elastic.cli.course import Course, is_number, sampled
from elastic.cli.screen import recovery_line, screen
from elastic.cli.text import (
    clock,
    duration,
    name_of,
    number_text,
    printable,
    scalars_of,
    speed_text,
    text_of,
)
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, Kinds, check_kinds, first_line, open_folder, read_json
from elastic.store.journal import LineTail
from elastic.store.run_directory import check_status

LOOK_EVERY_S = 0.25
LOOK_REMOTE_EVERY_S = 5.0
LINE_EVERY_S = 2.0
NUM_DECISIONS = 4
METRICS_KINDS: Kinds = {
    "step": int,
    "loss": float | int | None,
    "generation": int,
    "world_size": int,
    "step_s": float,
}
LAST_BYTES = {"journal.jsonl": 1 << 20, "metrics.jsonl": 1 << 16, "reports.jsonl": 1 << 16}
"""So much of a file's end does the first look read: enough for the last decisions and steps."""


@dataclass(frozen=True)
class View:
    """One look at a run directory."""

    status: dict[str, Any]
    metrics: dict[str, Any]
    """The last committed step's line; empty before the first."""
    course: Course

    @property
    def step(self) -> int:
        return max(int(self.status["step"]), int(self.metrics.get("step", 0)))

    @property
    def steps(self) -> int | None:
        """Of the whole run; None if nobody knows: a script says itself when it is over."""
        return None if self.is_script else int(self.status["steps"])

    @property
    def step_text(self) -> str:
        return f"{self.step}" if self.steps is None else f"{self.step}/{self.steps}"

    @property
    def has_steps(self) -> bool:
        """Of a script at level 0 its reports are known, and no steps."""
        return bool(self.metrics) or not self.is_script

    @property
    def reported(self) -> list[tuple[str, str]]:
        """Names and values of the newest report."""
        return scalars_of(self.course.report)

    @property
    def world_size(self) -> int:
        """Of the last committed step: a run that has ended has no member any more."""
        return int(self.metrics.get("world_size", self.status["world_size"]))

    @property
    def generation(self) -> int:
        return int(self.metrics.get("generation", self.status["generation"]))

    @property
    def loss_text(self) -> str:
        loss = self.metrics.get("loss")
        if loss is None:
            return "not finite" if self.metrics and not self.is_script else "-"
        return number_text(loss)

    @property
    def is_script(self) -> bool:
        """Nobody knows its loss."""
        return "level" in self.status

    @property
    def left_s(self) -> float | None:
        """Seconds until the run is done; None if nobody knows, or it is."""
        is_open = self.status["phase"] == "finished" or self.steps is None
        return None if is_open else self.course.left_s(self.status["steps"])


class Progress:
    """Shows one run: a live view in a terminal, plain lines elsewhere. Close it at the end."""

    def __init__(self, console: Console, since: float = 0.0) -> None:
        """since: Unix time; decisions before it are an earlier part of the run."""
        self._console, self._since = console, since
        self._live: Live | None = None
        self._folder: Folder | None = None
        self._tails: dict[str, LineTail] = {}
        self._course = Course()
        self._shown: View | None = None
        self._unshown: list[str] = []
        self._decisions: deque[str] = deque(maxlen=NUM_DECISIONS)
        self._looked_at = self._line_at = -LINE_EVERY_S
        self._line_of: tuple[int, dict[str, Any]] = (0, {})
        """The step and the report of the last line."""
        self._trouble = ""
        """Why the last look failed; empty after one that did not."""
        self._showing = threading.Lock()
        self._is_closed = False

    def __call__(self, run_directory: str) -> View | None:
        """Look at the run directory, if it is time, and show what is new. Cheap to call often; a
        look that fails is one line, and the next one may succeed."""
        now = time.monotonic()
        try:
            if self._folder is None:
                self._folder = open_folder(run_directory)
            every_s = LOOK_EVERY_S if self._folder.local else LOOK_REMOTE_EVERY_S
            if now - self._looked_at < every_s:
                return self._shown
            self._looked_at = now
            status = self._read(self._folder)
        except (OSError, WrongInput) as error:
            self.tell_trouble(error)
            return self._shown
        self._trouble = ""
        with self._showing:
            if not self._is_closed:
                self._show(status, now)
        return self._shown

    def tell_trouble(self, error: OSError | WrongInput) -> None:
        """One line for whatever is new."""
        trouble = first_line(error)
        if trouble != self._trouble:
            self.tell(f"the run cannot be looked at now: {trouble}")
        self._trouble = trouble

    def tell(self, line: str) -> None:
        """Beside what is shown of the run."""
        with self._showing:
            if not self._is_closed:
                self._print(line)

    def close(self) -> None:
        with self._showing:
            self._is_closed = True
            if self._live is not None:
                self._live.stop()
                self._live = None
            elif self._shown is not None:
                self._print_step(self._shown, time.monotonic())

    def _print_step(self, view: View, now: float) -> None:
        if (view.step, view.course.report) != self._line_of:
            self._line_at, self._line_of = now, (view.step, view.course.report)
            self._print(step_line(view))

    def _read(self, folder: Folder) -> dict[str, Any] | None:
        """What is new; gives status.json."""
        for line in self._new(folder, "journal.jsonl"):
            self._unshown += told(line, self._since)
        if "metrics.jsonl" not in self._tails:
            self._course.hear(sampled(folder, "metrics.jsonl", LAST_BYTES["metrics.jsonl"]))
        steps = self._new(folder, "metrics.jsonl")
        self._course.hear(steps)
        for line in steps[-1:]:
            kinds = {name: kind for name, kind in METRICS_KINDS.items() if name in ("step", *line)}
            check_kinds(line, kinds, "the last line of metrics.jsonl")
            self._course.newest = line
        status = read_json(folder, "status.json")
        if status is not None:
            check_status(status, "status.json")
            if "level" in status:
                for line in self._new(folder, "reports.jsonl")[-1:]:
                    self._course.report = line
        return status

    def _show(self, status: dict[str, Any] | None, now: float) -> None:
        decisions, self._unshown = self._unshown, []
        self._decisions.extend(decisions)
        if not self._console.is_terminal:
            for line in decisions:
                self._print(line)
        if status is None:
            return
        before, self._shown = self._shown, View(status, self._course.newest, self._course)
        if before is not None and not self._console.is_terminal:
            for line in recovered_since(before.status, status):
                self._print(line)
        if self._console.is_terminal:
            self._draw(self._shown)
        elif now - self._line_at >= LINE_EVERY_S:
            self._print_step(self._shown, now)

    def _new(self, folder: Folder, name: str) -> list[dict[str, Any]]:
        if name not in self._tails:
            self._tails[name] = LineTail(folder, name, last_bytes=LAST_BYTES[name])
        return self._tails[name].poll()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _draw(self, view: View) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(screen(view, tuple(self._decisions)), refresh=True)


def recovered_since(before: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """A line for each recovery that an earlier status did not have."""
    then, now = before.get("account"), status.get("account")
    if now is None:
        return []
    num_new = now["num_recoveries"] - (then["num_recoveries"] if then else 0)
    newest: list[dict[str, Any]] = now["recoveries"][-num_new:] if num_new > 0 else []
    return [recovery_line(recovery) for recovery in newest]


def is_told(line: dict[str, Any]) -> bool:
    """Whether a line of the journal is a decision with a reason."""
    return bool(line.get("entry", {}).get("reason"))


def told(line: dict[str, Any], since: float) -> list[str]:
    """A decision for a person, or how pipelines share the model; none if it is no decision with a
    reason, is older, or is damaged."""
    try:
        if "planned" in line and line.get("at", since) >= since:
            return layout_lines(line["planned"])
        is_wanted = is_told(line) and line.get("at", since) >= since
        return [*mark_of(line), timed(line.get("at"), decision_line(line))] if is_wanted else []
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return []


def layout_lines(planned: dict[str, Any]) -> list[str]:
    layout = f'generation={planned["generation"]} layout="{printable(planned["layout"])}"'
    return [layout, *(f"warning: {printable(warning)}" for warning in planned["warnings"])]


def mark_of(line: dict[str, Any]) -> list[str]:
    """What parts the run's starts, above the first line of each that is not the first."""
    if line["entry"].get("type") != "Started" or not line["entry"].get("earlier_generations"):
        return []
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(line["at"]))
    return [f"--- the run was started again, {at} ---"]


def decision_line(line: dict[str, Any]) -> str:
    """A decision of the journal for a person; `size` where a generation is formed by it."""
    sizes = [
        f"size={len(command['membership']['workers'])} "
        for command in line["entry"]["commands"]
        if command["type"] == "Form"
    ]
    return (
        f"generation={line['generation']} step={line['step']} {''.join(sizes)}"
        f'phase={line["phase"]} reason="{printable(line["entry"]["reason"])}"'
    )


def step_line(view: View) -> str:
    speed, left_s = view.course.steps_per_s, view.left_s
    pace = "" if speed is None else f"steps_per_s={speed_text(speed)} "
    pace += "" if left_s is None else f"left={duration(left_s)} "
    reported = "".join(f"{name}={value} " for name, value in view.reported)
    of_group = f"world_size={view.world_size} generation={view.generation}"
    if not view.has_steps:
        return timed(view.course.report.get("time"), f"reports={view.step} {reported}{of_group}")
    loss = reported if view.course.report else f"loss={view.loss_text} "
    step_s = f"step_s={view.metrics.get('step_s') or 0.0:.3f}"
    return timed(view.metrics.get("time"), f"step={view.step_text} {loss}{step_s} {pace}{of_group}")


def timed(at: object, line: str) -> str:
    """Behind its time of day in UTC, where it has one."""
    return f"{clock(at)} {line}" if is_number(at) else line


def worker_table(status: dict[str, Any]) -> Table:
    """Every worker of status.json, standbys last; the blocks of its stage if there are pipelines;
    what each takes for its own part of a step once that is measured."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    workers = [*status["workers"], *status["standby"]]
    has_own = any(worker.get("own_s") is not None for worker in workers)
    has_blocks = any(worker.get("blocks") is not None for worker in workers)
    columns = ["worker", "rank", "state", "step", "pid", "node", "device"]
    columns += (["blocks"] if has_blocks else []) + (["s/micro-batch"] if has_own else [])
    for column in columns:
        table.add_column(column)
    for worker in workers:
        rank, own_s = worker.get("rank"), worker.get("own_s")
        shown = [text_of(worker.get("blocks"))] if has_blocks else []
        shown += ["-" if own_s is None else f"{own_s:.3f}"] if has_own else []
        table.add_row(
            name_of(worker.get("id")),
            "-" if rank is None else str(rank),
            *(text_of(worker.get(key)) for key in ("state", "step", "pid", "node_ip", "device")),
            *shown,
        )
    return table
