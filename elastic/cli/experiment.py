"""`elastic experiment SWEEP.yaml`: every scenario with every seed on a run of its own.

What a sweep may say is elastic/experiment/sweep.py's, what is made of the runs the other files'
there. Runs and faults are the commands that people type, in processes of their own.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from elastic.chaos.report import read_story, report
from elastic.cli.job_file import SECTIONS, is_of, option, read_job
from elastic.cli.journal import followed
from elastic.cli.text import printable
from elastic.experiment import results
from elastic.experiment.page import page
from elastic.experiment.results import Row
from elastic.experiment.summary import summaries
from elastic.experiment.sweep import NO_FAULTS, Condition, Point, Sweep, read_sweep
from elastic.observe.charts import open_charts
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted
from elastic.store.files import first_line, open_folder, read_json, write_local

WRONG_INPUT = 2
PAGE = "experiment.html"
END_S = 60.0
"""So long a run that is asked to stop may take, and a report of faults behind the run's end."""
FIXED = ("target", "arguments", "place", "name", "cluster", "pip", "uv", "env", "address")
"""Keys of a job file that are the same for all runs, or nothing to a run."""


def experiment(
    sweep_file: Annotated[
        Path, typer.Argument(metavar="SWEEP", help="A YAML file: job, scenarios, seeds, vary.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, do nothing.")] = False,
) -> int:
    """Run a job under every scenario and seed, and compare: one CSV, one HTML page.

    The same command again goes on where it was ended.
    """
    sweep = read_sweep(sweep_file)
    check_options(sweep, str(sweep_file))
    if dry_run:
        for point in sweep.points:
            print(point.name)
        return 0
    open_charts()  # before hours of runs
    try:
        sweep.place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(f"{sweep.place} cannot be made: {first_line(error)}") from error
    for number in (signal.SIGTERM, signal.SIGHUP):  # runs are to end with us
        signal.signal(number, signal.default_int_handler)
    Experiment(sweep, sweep_file.stem).run()
    return 0


def check_options(sweep: Sweep, place: str) -> None:
    """WrongInput for a job file that cannot be read, and for an option that cannot vary."""
    read_job(sweep.job)
    kinds = {key: of for section in SECTIONS.values() for key, of in section.items()}
    free = [key for key in kinds if key not in FIXED]
    for key, value in {pair for condition in sweep.conditions for pair in condition.options}:
        if key not in free:
            raise WrongInput(f"{place}: vary.{key} is no option that can vary: {', '.join(free)}")
        if not is_of(value, kinds[key]):
            wanted = " or ".join(kinds[key])
            raise WrongInput(f"{place}: vary.{key} must be {wanted}, got {value!r}")


@dataclass
class Experiment:
    """A sweep being carried out, one run after another."""

    sweep: Sweep
    name: str
    _rows: list[Row] = field(default_factory=list[Row])
    _took_s: list[float] = field(default_factory=list[float])

    def run(self) -> None:
        place, columns = self.sweep.place, results.columns_of(self.sweep.conditions)
        self._rows = results.read_results(place, columns)
        points = self.sweep.points
        waiting = [point for point in points if not self._is_done(point)]
        if num_done := len(points) - len(waiting):
            print(f"{num_done} of {counted(len(points), 'run')} are in {place / results.FILE}")
        try:
            for number, point in enumerate(waiting, start=num_done + 1):
                began = time.monotonic()
                row = run_point(self.sweep, point)
                self._took_s.append(time.monotonic() - began)
                self._rows.append(row)
                results.write_results(place, columns, self._rows)
                line = told(row, point, number, len(points)) + self._left(len(points) - number)
                print(line, flush=True)
        finally:
            self._write_page(len(points))

    def _is_done(self, point: Point) -> bool:
        return any(results.key_of(point).items() <= row.items() for row in self._rows)

    def _left(self, num_left: int) -> str:
        left_s = num_left * statistics.mean(self._took_s)
        return f"; about {left_s / 60:.0f} min left" if left_s >= 60 else ""

    def _write_page(self, num_points: int) -> None:
        path = self.sweep.place / PAGE
        try:
            found = summaries(self.sweep, self._rows)
        except ValueError as error:
            raise WrongInput(f"{self.sweep.place / results.FILE} is damaged: {error}") from error
        write_local(path, page(self.name, found, num_points).encode(), is_durable=False)
        print(f"results: {self.sweep.place / results.FILE}, {path}")


def told(row: Row, point: Point, number: int, count: int) -> str:
    """One line about a run that has ended."""
    line = f"[{number}/{count}] {point.condition}, seed {point.seed}: {row['outcome']}"
    if row["wall_s"]:
        line += (
            f" in {float(row['wall_s']):.1f} s, {counted(int(row['faults']), 'fault')}, "
            f"{counted(int(row['lost_steps']), 'lost step')}, goodput "
            f"{100 * float(row['goodput_time']):.1f} %, longest gap "
            f"{float(row['longest_gap_s']):.2f} s"
        )
    return printable(line)


# --- one run -----------------------------------------------------------------------
def run_point(sweep: Sweep, point: Point) -> Row:
    """WrongInput if the job cannot be run at all."""
    name = free_name(sweep.place, point.name)
    directory, log = sweep.place / name, sweep.place / f"{name}.log"
    is_late = False
    print(f"{name} begins; what it prints is in {log}", flush=True)
    with log.open("wb") as output, ended_with_us(output) as started:
        words = options_of(point.condition)
        words += ["--storage", str(sweep.place), "--name", name]
        driver = started(["run", str(sweep.job), *words])
        chaos = start_faults(sweep, point, directory, driver.pid, started)
        try:
            driver.wait(sweep.limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            driver.send_signal(signal.SIGINT)
        if chaos and not (directory / "config.json").exists():
            chaos.kill()  # the run never began, and it would wait on
            chaos = None
        if chaos:
            with suppress(subprocess.TimeoutExpired):
                chaos.wait(END_S)
    if driver.returncode == WRONG_INPUT or (chaos and chaos.returncode == WRONG_INPUT):
        raise WrongInput(f"{point.name} cannot be run: {last_line(log)}")
    return row_of(directory, point, is_late=is_late)


def free_name(place: Path, name: str) -> str:
    """What an earlier attempt has left that was cut off stays as it is."""
    attempts = (name if i == 1 else f"{name}.{i}" for i in range(1, 10_000))
    return next(found for found in attempts if not (place / found).exists())


def options_of(condition: Condition) -> list[str]:
    return [word for key, value in condition.options for word in option(key, value, ())]


def start_faults(
    sweep: Sweep, point: Point, directory: Path, driver_pid: int, started: "Start"
) -> subprocess.Popen[bytes] | None:
    """At once: they wait for the run's first step themselves, as long as its driver waits for
    machines. None without a scenario."""
    if point.condition.scenario == NO_FAULTS:
        return None
    words = ["chaos", point.condition.scenario, str(directory), "--seed", str(point.seed)]
    address = read_job(sweep.job).get("resources", {}).get("address")
    words += ["--address", address] if address else []
    return started([*words, "--driver-pid", str(driver_pid), "--wait", "inf"])


class Start:
    """Starts commands of ours, which end with the block."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C is for us to pass on, once."""
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@contextmanager
def ended_with_us(output: BinaryIO) -> Generator[Start]:
    """Whatever still runs behind the block is asked to stop as by Ctrl-C, and then killed."""
    start = Start(output)
    try:
        yield start
    finally:
        for process in start.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        try:
            for process in start.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
        finally:  # a second Ctrl-C ends the waiting, too
            for process in start.processes:
                process.kill()
                process.wait()


def row_of(directory: Path, point: Point, *, is_late: bool) -> Row:
    """From the run's files."""
    folder = open_folder(str(directory))
    try:
        with followed(str(folder)):
            found = report(read_story(folder))
    except WrongInput:  # it came to nothing
        outcome = "past limit_s" if is_late else "failed"
        return results.nothing_of(point, outcome, directory.name)
    row = results.row_of(point, found, read_json(folder, "result.json") or {}, directory.name)
    return {**row, "outcome": "past limit_s"} if is_late else row


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), f"see {log}")
