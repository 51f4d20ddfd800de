"""A run started as a user starts it, and everything a test may do to it from outside."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.cluster.fork_client import ADDRESS, Order
from tests.cluster.fork_server import Forked

JOBS = Path(__file__).parent / "jobs"
PATIENCE_S = 150.0
FEW_READERS = {"RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "2"}
"""Ray Data starts 32 processes to read the footers of a few small files."""
RARE_REPORTS = {
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
    "RAY_metrics_report_interval_ms": "600000",
}
"""Ray's agents look at all processes of the machine every few seconds, for each node."""
DEVICE = os.environ.get("ELASTIC_TEST_DEVICE", "cpu")
"""Of runs whose test names none: a machine with a GPU or two must not decide it."""


def environment(temp: Path) -> dict[str, str]:
    """No cluster of this machine is found, none is touched."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return env | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(temp)} | FEW_READERS | RARE_REPORTS


def skip_without_gpus(options: dict) -> None:
    """A test that asks for more workers than this machine has GPUs."""
    import pytest
    import torch

    most = str(options.get("workers", 1)).rpartition(".")[2]  # of "2..4" the 4
    needed, there = int(most) + int(options.get("standby", 0)), torch.cuda.device_count()
    if needed > there:
        pytest.skip(f"{needed} workers need as many GPUs, and {there} are there")


class Ended(NamedTuple):
    """What a program left that has ended."""

    returncode: int | None
    stdout: str
    stderr: str


class LiveRun:
    """`elastic run` in a process of its own. Use as a context manager.

    A job that sleeps in its steps (`set=["sleep=..."]`) does so until the test calls `finish`: a
    fault has the time that it needs in few steps, and what follows takes no longer than it must.

    On a Ray of its own all its processes are started as a user's are, and on hosts the driver. On
    another Ray they are forked from one that has imported torch already.
    """

    look_every_s = 0.05
    """How often a test that waits for the end looks at the status."""

    def __init__(self, target: str, storage: Path | str, name: str, ray_temp: Path, **options):
        self.directory = Path(storage) / name
        arguments = ["run", target, "--storage", str(storage), "--name", name, "--json"]
        defaults = {"steps": 30, "global_batch": 48, "micro_batch": 6, "reduction": "bitwise"}
        defaults["device"] = DEVICE
        if DEVICE == "cuda":
            skip_without_gpus(options)
        place = hashlib.sha256(f"{storage}/{name}".encode()).hexdigest()[:16]
        self._awake = ray_temp / f"awake-{place}"
        for key, value in {**defaults, **options}.items():
            if key == "set":
                if any(setting.startswith("sleep=") for setting in value):
                    value = [*value, f"until={str(self._awake)!r}"]
                for setting in value:
                    arguments += ["--set", setting]
            elif value is True:
                arguments.append(f"--{key.replace('_', '-')}")
            else:
                arguments += [f"--{key.replace('_', '-')}", str(value)]
        self.command = [sys.executable, "-m", "elastic", *arguments]
        self._is_forked = ADDRESS in os.environ and options.get("address", "local") != "local"
        self.env = environment(ray_temp)
        self.seen_pids: set[int] = set()

    def __enter__(self) -> "LiveRun":
        self._awake.unlink(missing_ok=True)
        if self._is_forked and self.command[0] == sys.executable:
            order = Order(self.command[1:], self.env, os.getcwd())
            self.process = Forked(os.environ[ADDRESS], order, with_ray=True)
        else:
            self.process = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.env,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()

    # --- what it says -----------------------------------------------------------
    def status(self) -> dict:
        try:
            return json.loads((self.directory / "status.json").read_text())
        except FileNotFoundError:
            return {"phase": "absent", "step": 0, "workers": [], "standby": [], "world_size": 0}

    def wait_for(self, what, patience_s: float = PATIENCE_S) -> dict:
        """Poll status.json until `what(status)`; fails the test if the run ends before."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            status = self.status()
            rows = [*status["workers"], *status["standby"]]
            self.seen_pids |= {r["pid"] for r in rows if r["pid"]}
            if what(status):
                return status
            if self.process.poll() is not None:
                out, err = self.process.communicate()
                raise AssertionError(f"the run ended early:\n{status}\n{out}\n{err}")
            time.sleep(0.01)  # polling, bounded by the deadline
        raise AssertionError(f"not in {patience_s} s: {self.status()}")

    def wait_for_step(self, what) -> dict:
        """As wait_for, and for a step after it: the recovery, if it was one, is over, and what
        comes next is one of its own. Returns the status that `what` was true of."""
        status = self.wait_for(what)
        self.wait_for(lambda s: s["step"] > status["step"])
        return status

    def wait_or_end(self, what, patience_s: float = PATIENCE_S) -> dict | None:
        """As wait_for; None if the run ends before."""
        try:
            return self.wait_for(what, patience_s)
        except AssertionError:
            if self.process.poll() is None:
                raise
            return None

    def finish(self, patience_s: float = 2 * PATIENCE_S, *, asleep: bool = False) -> dict:
        """Wait for the end: {"status", "out", "err", "result"}. asleep: at the job's own pace."""
        if not asleep:
            self._awake.touch()
        deadline = time.monotonic() + patience_s
        while self.process.poll() is None and time.monotonic() < deadline:
            status = self.status()
            rows = [*status["workers"], *status["standby"]]
            self.seen_pids |= {r["pid"] for r in rows if r["pid"]}
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.look_every_s)
        assert self.process.poll() is not None, f"still runs: {self.status()}"
        out, err = self.process.communicate()
        path = self.directory / "result.json"
        result = json.loads(path.read_text()) if path.exists() else None
        return {"status": self.process.returncode, "out": out, "err": err, "result": result}

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    # --- what is done to it ---------------------------------------------------------
    def kill(self, rank: int) -> float:
        """SIGKILL the worker with this rank; returns the Unix time."""
        pid = next(w["pid"] for w in self.status()["workers"] if w["rank"] == rank)
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at


def elastic(env: dict[str, str], *words: object, **how) -> Ended:
    """`elastic WORDS`, forked as a run's driver is."""
    return python(env, "-m", "elastic", *words, **how)


def python(env: dict[str, str], *arguments: object, patience_s: float = PATIENCE_S, **how) -> Ended:
    """The interpreter, as if started with these arguments; its end is waited for."""
    process = begin(env, *arguments, **how)
    try:
        out, err = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ended(process.returncode, out, err)


def begin(
    env: dict[str, str], *arguments: object, folder: Path | None = None, with_ray: bool = True
) -> Forked:
    """As `python`, which does not wait."""
    order = Order([str(a) for a in arguments], env, str(folder or os.getcwd()))
    return Forked(os.environ[ADDRESS], order, with_ray=with_ray)


def assert_complete(run: LiveRun, steps: int) -> None:
    """metrics.jsonl and samples.jsonl have every step once."""
    assert [m["step"] for m in run.lines("metrics.jsonl")] == list(range(1, steps + 1))
    assert [s["step"] for s in run.lines("samples.jsonl")] == list(range(1, steps + 1))


def assert_same_bits(run: LiveRun, end: dict, expected: tuple[str, list[str]], steps: int) -> None:
    """It succeeded, and every step's samples and the weights are those of the uninterrupted run."""
    sha256, samples = expected
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, steps)


def assert_gone(pids) -> None:
    """Soon: what other nodes run ends by a message."""
    deadline = time.monotonic() + 10
    while leftovers(pids) and time.monotonic() < deadline:
        time.sleep(0.05)  # polling, bounded by the deadline
    assert leftovers(pids) == []


def leftovers(pids) -> list[int]:
    """Those of `pids` that still run, zombies apart."""
    alive = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                alive.append(pid)
    return alive
