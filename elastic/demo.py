"""`python -m elastic.demo`: train, SIGKILL a worker, heal, and compare the bits with a calm run.

With `--parallel pp:2` the first run is in stages, and its layout is told for each generation. It
uses only what any user has: the `elastic` command and the files of the run directories.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

STEPS = 120
KILL_AFTER = 0.4  # of the steps
NUM_WORKERS = 3
NUM_STAGED_WORKERS = 4  # two pipelines of two stages
VICTIM_RANK = 0  # not special: the run goes on without it as without any other
TIMEOUT_S = 600
POLL_S = 0.05
SAY_EVERY = 20  # steps, where there is no terminal
CHARLM = "workers.workloads.charlm:CharLM"
ONE_BIT_OFF = "workers.workloads.charlm:OneBitOff"
PHASES = ("detect_s", "fence_s", "form_s", "state_s", "first_step_s", "total_s")

JSON = dict[str, Any]


class DemoFailed(Exception):
    """A run did not do what the demo shows; the message is for the reader of the terminal."""


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    steps: int
    parallel: str
    is_diverging: bool

    @property
    def kill_at(self) -> int:
        """The step."""
        return int(KILL_AFTER * self.steps)

    @property
    def num_workers(self) -> int:
        """Of the faulty job, undisturbed."""
        return NUM_STAGED_WORKERS if self.parallel.startswith("pp:") else NUM_WORKERS


@dataclass
class Job:
    """One `elastic run` as a process, seen through the files of its run directory."""

    name: str
    process: subprocess.Popen[bytes]
    directory: Path
    driver_log: Path
    steps: int
    step: int = 0
    world_size: int = 0
    generation: int = -1

    @classmethod
    def start(
        cls, name: str, target: str, workers: str, storage: Path, *, steps: int, parallel: str
    ) -> Self:
        driver_log = storage / f"{name}.log"
        command = [str(Path(sys.executable).with_name("elastic")), "run", target]
        command += ["--workers", workers, "--steps", str(steps), "--global-batch", "64"]
        command += ["--micro-batch", "8", "--seed", "0", "--reduction", "bitwise"]
        command += ["--device", "cpu"]  # a machine with one GPU has no four
        command += ["--storage", str(storage), "--name", name, "--json"]
        command += ["--set", f"decay_steps={steps}", "--parallel", parallel]
        with driver_log.open("wb") as log, (storage / f"{name}.json").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=log)
        return cls(name, process, storage / name, driver_log, steps)

    def status(self) -> JSON:
        """`status.json`; {} until the run has written one."""
        path = self.directory / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def metrics(self) -> list[JSON]:
        """The complete lines; the last one may still be in the making."""
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def layouts(self) -> dict[int, str]:
        """By generation, of a run in stages."""
        lines = map(json.loads, (self.directory / "journal.jsonl").read_text().splitlines())
        planned = [line["planned"] for line in lines if "planned" in line]
        return {each["generation"]: each["layout"] for each in planned}

    def result(self) -> JSON:
        return json.loads((self.directory / "result.json").read_text())

    def is_running(self) -> bool:
        return self.process.poll() is None

    def check(self) -> None:
        if not self.is_running() and self.process.returncode != 0:
            tail = "\n".join(self.driver_log.read_text(errors="replace").splitlines()[-15:])
            raise DemoFailed(f"{self.name} ended with {self.process.returncode}:\n{tail}")

    def end(self) -> None:
        """As Ctrl-C does: once, once more, then without asking."""
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if not self.is_running():
                return
            self.process.send_signal(signal_number)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                continue


class Screen:
    """Live bars in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:>14}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
        )
        self.bars: dict[str, TaskID] = {}

    def show(self, job: Job, status: JSON) -> None:
        step, world_size = int(status["step"]), int(status["world_size"])
        is_new = (status["generation"], world_size) != (job.generation, job.world_size)
        if job.name not in self.bars:
            self.bars[job.name] = self.progress.add_task(job.name, total=job.steps, news="")
        news = f"generation {status['generation']}, {world_size} workers, {status['phase']}"
        self.progress.update(self.bars[job.name], completed=step, news=news)
        is_mark = step // SAY_EVERY != job.step // SAY_EVERY
        if not self.console.is_terminal and (is_new or is_mark):
            self.say(f"{job.name}: step {step}/{job.steps}, {news}")
        job.step, job.world_size, job.generation = step, world_size, int(status["generation"])

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def kill(job: Job, status: JSON, screen: Screen) -> None:
    victim = next(w for w in status["workers"] if w["rank"] == VICTIM_RANK)
    os.kill(victim["pid"], signal.SIGKILL)
    screen.say(f"-> SIGKILL {victim['id']} (rank {victim['rank']}, pid {victim['pid']}) now")


def run_both(storage: Path, plan: Plan, screen: Screen) -> tuple[Job, Job]:
    """The faulty job; and the calm one beside it as soon as the faulty one has healed."""
    deadline = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        workers, steps = f"2..{plan.num_workers}", plan.steps
        faulty = Job.start("faulty", CHARLM, workers, storage, steps=steps, parallel=plan.parallel)
        stack.callback(faulty.end)
        calm: Job | None = None
        is_killed = False
        while calm is None or faulty.is_running() or calm.is_running():
            if time.monotonic() > deadline:
                raise DemoFailed(f"not finished after {TIMEOUT_S} s; see {storage}")
            for job in (faulty, calm):
                if job is not None and (status := job.status()):
                    screen.show(job, status)
                    is_full = status["phase"] == "running" and job.world_size == plan.num_workers
                    if not is_killed and is_full and job.step >= plan.kill_at:
                        kill(job, status, screen)
                        is_killed = True
                if job is not None:
                    job.check()
            if calm is None and (
                (is_killed and has_healed(faulty, plan)) or not faulty.is_running()
            ):
                target = ONE_BIT_OFF if plan.is_diverging else CHARLM
                screen.say(f"-> the calm job starts: {target}")
                calm = Job.start("calm", target, "1", storage, steps=steps, parallel="ddp")
                stack.callback(calm.end)
            time.sleep(POLL_S)
        if not is_killed:
            raise DemoFailed(f"the run ended before a worker could be killed; see {storage}")
        return faulty, calm


def has_healed(job: Job, plan: Plan) -> bool:
    """Every worker is back, and a step was committed by all of them."""
    if job.world_size < plan.num_workers or job.generation < 2:
        return False
    lines = job.metrics()
    return lines[-1]["world_size"] == plan.num_workers and any(
        line["world_size"] < plan.num_workers and line["step"] > plan.kill_at for line in lines
    )


def membership_table(lines: list[JSON]) -> Table:
    """One row per generation, from metrics.jsonl."""
    table = Table(title="Membership (faulty job)", title_justify="left")
    for column in ("generation", "workers", "steps", "seconds", "why"):
        table.add_column(column, justify="left" if column == "why" else "right")
    begun_at = lines[0]["time"] - lines[0]["step_s"]
    generations = sorted({line["generation"] for line in lines})
    before = 0
    for generation in generations:
        own = [line for line in lines if line["generation"] == generation]
        size = own[0]["world_size"]
        why = "start" if not before else "shrink" if size < before else "grow: a worker joined"
        seconds = f"{own[0]['time'] - begun_at:.1f} .. {own[-1]['time'] - begun_at:.1f}"
        steps = f"{own[0]['step']}..{own[-1]['step']}"
        table.add_row(str(generation), str(size), steps, seconds, why)
        before = size
    return table


def recovery_table(recoveries: list[JSON]) -> Table:
    table = Table(title="Recovery, milliseconds", title_justify="left")
    table.add_column("cause", no_wrap=True, min_width=len("process_died"))
    for phase in (*PHASES, "lost"):
        table.add_column(phase.removesuffix("_s").replace("_", " "), justify="right")
    for recovery in recoveries:
        milliseconds = [f"{1000 * recovery[phase]:.0f}" for phase in PHASES]
        table.add_row(recovery["cause"], *milliseconds, str(recovery["lost_steps"]))
    return table


def short_number(val: float, chars: int, delta: float, left: bool = False) -> str:
    text = f"{val:.3g}"
    return text.ljust(chars) if left else text.rjust(chars)


def loss_curve(faulty: list[JSON], calm: list[JSON]) -> str:
    """Both curves in characters; where the bits are equal they cover each other."""
    import plotille  # pyright: ignore[reportMissingTypeStubs]  (it has annotations)

    figure = plotille.Figure()
    figure.width, figure.height = 60, 12
    figure.with_colors = False
    figure.x_label, figure.y_label = "step", "loss"
    figure.set_x_limits(0, faulty[-1]["step"])
    figure.register_label_formatter(float, short_number)
    for lines in (faulty, calm):
        shown = [line for line in lines if line["loss"] is not None]
        figure.plot([line["step"] for line in shown], [line["loss"] for line in shown])
    return figure.show(legend=False)


def show_results(faulty: Job, calm: Job, screen: Screen) -> bool:
    """Print everything; True if the weights of both jobs are equal, bit for bit."""
    from elastic.store.catalogue import Catalogue
    from elastic.store.files import open_folder
    from workers.checkpoint.load import checkpoint_sha256

    result, lines = faulty.result(), faulty.metrics()
    curve = loss_curve(lines, calm.metrics())
    (faulty.directory.parent / "loss.txt").write_text(curve)
    screen.say(curve)
    screen.console.print(membership_table(lines))
    for generation, layout in faulty.layouts().items():
        screen.say(f"layout of generation {generation}: {layout}")
    screen.console.print(recovery_table(result["recoveries"]))
    badput = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["badput"].items())
    screen.say(f"goodput {100 * result['goodput']:.1f} % (not training: {badput})")
    screen.say(f"committed steps lost: {result['lost_steps']}; loss {result['loss']:.4f}")
    hashes: list[str] = []
    for job in (faulty, calm):
        sha = checkpoint_sha256(Catalogue(open_folder(str(job.directory)).at("checkpoints")))
        screen.say(f"{job.name:>6}: SHA-256 of the weights in the checkpoint {sha}")
        if sha != job.result()["weights_sha256"]:
            raise DemoFailed(f"{job.name}: result.json claims {job.result()['weights_sha256']}")
        hashes.append(sha)
    is_equal = hashes[0] == hashes[1]
    screen.say(f"Weights equal, bit for bit: {'YES' if is_equal else 'NO'}")
    return is_equal


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.demo", description=__doc__)
    parser.add_argument("--diverge", action="store_true", help="change one bit: must say NO")
    parser.add_argument("--parallel", default="ddp", help="of the faulty job, such as pp:2")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    plan = Plan(arguments.steps, arguments.parallel, arguments.diverge)
    storage = Path(tempfile.mkdtemp(prefix="elastic-demo-"))
    screen = Screen(Console())
    screen.say(
        f"A character transformer on the source of Python's standard library, {plan.steps} steps.\n"
        f"faulty: {plan.parallel}, 2..{plan.num_workers} workers, one of them is SIGKILLed at step "
        f"{plan.kill_at}\n"
        f"calm:   1 worker, nothing happens to it\nrun directories: {storage}"
    )
    begun_at = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the jobs, as Ctrl-C does
    try:
        with ExitStack() as stack:
            if screen.console.is_terminal:
                stack.enter_context(screen.progress)
            faulty, calm = run_both(storage, plan, screen)
        is_equal = show_results(faulty, calm, screen)
    except DemoFailed as failure:
        screen.say(f"The demo failed: {failure}")
        return 1
    except KeyboardInterrupt:
        screen.say("stopped")
        shutil.rmtree(storage, ignore_errors=True)
        return 130
    screen.say(f"{time.monotonic() - begun_at:.0f} s; the files stay in {storage}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
