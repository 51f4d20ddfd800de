"""What every benchmark shares: the machine's state, alternating pairs, our runs as subprocesses,
and rows in RESULTS.md.

What is measured is in the modules beside it.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "RESULTS.md"
REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.02
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
CHARLM = "workers.workloads.charlm:CharLM"
console = Console(width=110)


def environment(tree: Path = REPOSITORY) -> dict[str, str]:
    """For every process that is measured: one intra-op thread, no Ray authentication."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(tree)}


def machine(ranks: int) -> str:
    """Cores, load and versions; says when there are more ranks than cores."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    over = f", OVERSUBSCRIBED: {ranks} ranks" if ranks > cores else ""
    versions = f"torch {version('torch')}, ray {version('ray')}"
    return f"{cores} cores, load {load:.1f} before{over}, {versions}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def alternating(
    pairs: int, first: Callable[[], float], second: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Measure both in turn, so that a change of the machine's load hits both."""
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(pairs):
        ours.append(first())
        theirs.append(second())
        console.print(f"pair {pair + 1}/{pairs}: {ours[-1]:.4g} against {theirs[-1]:.4g}")
    return ours, theirs


def report(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def record(benchmark: str, *, about: str, setting: str, results: dict[str, str]) -> None:
    """Append one dated row to RESULTS.md; `about` is what `machine()` said before the benchmark."""
    rerun = " ".join(["python -m", f"tests.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    if not RESULTS.exists():
        RESULTS.write_text(
            "# Results\n\nAppended by the benchmarks, newest last. Never edited afterwards.\n\n"
            "| date (UTC) | benchmark | setting | result | machine | rerun |\n"
            "|---|---|---|---|---|---|\n"
        )
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    said = "; ".join(f"{name} {value}" for name, value in results.items())
    row = f"| {date} | {benchmark} | {setting} | {said} | {about} | `{rerun}` |\n"
    with RESULTS.open("a") as file:
        file.write(row)
    console.print(row.strip())


@dataclass(frozen=True)
class Run:
    """One `elastic run` in a process of its own, watched through the files of its run directory."""

    process: subprocess.Popen[str]
    directory: Path
    begun_at: float

    def status(self) -> dict[str, Any]:
        """`status.json`, or {} while there is none."""
        try:
            return json.loads((self.directory / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def metrics(self) -> list[dict[str, Any]]:
        return lines_of(self.directory / "metrics.jsonl")

    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict:
        """The first status that fulfils the condition; fails if the run ends before it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if status and condition(status):
                return status
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended early ({self.process.returncode}): {self.log()}")
            time.sleep(POLL_S)
        raise TimeoutError(f"not in {timeout_s} s; last status: {self.status()}")

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the end; the run must have succeeded."""
        self.process.wait(timeout_s)
        if self.process.returncode:
            raise RuntimeError(f"exit status {self.process.returncode}: {self.log()}")
        return self.result()

    def log(self) -> str:
        return (self.directory.parent / f"{self.directory.name}.driver.log").read_text()[-3000:]


@contextmanager
def elastic_run(storage: Path, name: str, **options: object):
    """Start `elastic run` with the options (`_` for `-`; `set_` is a dict); ended on leaving.

    `tree`: the checkout whose code runs, this one unless given.
    """
    arguments = ["--storage", str(storage), "--name", name]
    tree = Path(str(options.pop("tree", REPOSITORY)))
    settings = options.pop("set_", {})
    target = str(options.pop("target", CHARLM))
    for option, value in options.items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    for key, value in dict(settings).items():  # type: ignore[call-overload]
        arguments += ["--set", f"{key}={value}"]
    begun_at = time.time()
    with (storage / f"{name}.driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic", "run", target, *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(tree),
            cwd=tree,
        )
    try:
        yield Run(process, storage / name, begun_at)
    finally:
        end(process)
        if process.stdout:
            process.stdout.close()


def end(process: subprocess.Popen[str]) -> None:
    """Stop it as a user would, by signals; then without asking."""
    for signal_number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(signal_number)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def storage_directory():
    with tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file that is still being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
