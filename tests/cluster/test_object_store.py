"""A whole run on a real S3 server, with a lost worker, a crash of everything, and an outage."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import pytest

from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder, place_of, read_json
from elastic.store.journal import read_lines
from tests.cluster.live import JOBS, LiveRun, elastic, leftovers
from tests.object_store import uri

pytestmark = pytest.mark.cluster

PATIENCE_S = 150.0
SILENT_S = 15.0
"""Three times a driver's lease."""
STEPS, EVERY = 60, 10
OPTIONS = {"steps": STEPS, "checkpoint_every": EVERY, "set": ["sleep=0.08"]}


class RemoteRun(LiveRun):
    """`elastic run` with storage in a bucket."""

    look_every_s = 0.5  # each look is a request

    def __init__(self, storage: str, ray_temp, **options) -> None:
        super().__init__(f"{JOBS / 'toy.py'}:Toy", storage, "run", ray_temp, **options)
        self.place = place_of(storage, "run")
        self.folder = open_folder(self.place)
        self.catalogue = Catalogue(self.folder.at("checkpoints"))

    def status(self) -> dict:
        absent = {"phase": "absent", "step": 0, "workers": [], "standby": [], "world_size": 0}
        return read_json(self.folder, "status.json") or absent

    def lines(self, name: str) -> list[dict]:
        return read_lines(self.folder, name)

    def result(self) -> dict | None:
        return read_json(self.folder, "result.json")

    def wait_for_checkpoint(self, step: int) -> None:
        self.wait_until(lambda: max(self.catalogue.steps(), default=0) >= step)

    def wait_until(self, what) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.3)  # polling, bounded by the deadline

    def elastic(self, *arguments: str) -> str:
        done = elastic(self.env, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def start_remote(s3, s3_server, ray_temp):
    storage = uri(s3_server.new_bucket(), "runs", s3.port)
    return lambda **options: RemoteRun(storage, ray_temp, **options)


@pytest.mark.slow
def test_a_terminal_on_a_bucket_that_is_silent_for_long_ends_no_run(start_remote, s3, reference):
    run = start_remote(workers=2, **{**OPTIONS, "set": ["sleep=0.05"]})
    run.command.remove("--json")
    terminal, other_end = os.openpty()
    process = subprocess.Popen(run.command, stdout=other_end, stderr=other_end, env=run.env)
    os.close(other_end)
    try:
        shown = b""
        while b"training" not in shown:  # the display has begun
            shown += os.read(terminal, 1 << 16)
        s3.faults.is_silent = True
        time.sleep(SILENT_S)  # this is the fault
        s3.faults.heal()
        with contextlib.suppress(OSError):  # EIO: its end
            while piece := os.read(terminal, 1 << 16):
                shown += piece
        assert process.wait(PATIENCE_S) == 0, shown.decode()
    finally:
        process.kill()
        os.close(terminal)
    sha256, samples = reference(steps=STEPS)
    assert run.result()["weights_sha256"] == sha256
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert [m["step"] for m in run.lines("metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_of_two_drivers_that_start_a_run_in_a_bucket_the_second_is_wrong_input(
    start_remote, reference
):
    with start_remote(workers=1, **OPTIONS) as one, start_remote(workers=1, **OPTIONS) as two:
        ended = [run.finish(asleep=True) for run in (one, two)]
    ends = sorted(ended, key=lambda end: end["status"])
    sha256, samples = reference(steps=STEPS)
    assert [end["status"] for end in ends] == [0, 2], ends
    assert "is being written by a live run" in ends[1]["err"]
    assert one.result()["weights_sha256"] == sha256
    assert [s["sha256"] for s in one.lines("samples.jsonl")] == samples


def test_a_run_in_a_bucket_survives_a_lost_worker_and_a_crash_of_everything(
    start_remote, reference, shared_head, machine
):
    with start_remote(workers=2, address=machine.address, **OPTIONS) as run:
        run.wait_until(lambda: len(run.status()["workers"]) == 2)
        run.kill(rank=0)
        run.wait_for_checkpoint(2 * EVERY)
        status = run.status()
        pids = [status["controller"]["pid"], *(w["pid"] for w in status["workers"])]
        machine.crash()
        run.process.kill()
        run.process.wait(30)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it was the one that was lost
                os.kill(pid, signal.SIGKILL)
    assert run.result() is None
    with start_remote(workers=3, address=shared_head.address, **OPTIONS) as again:
        end = again.finish()
    sha256, samples = reference(steps=STEPS)
    assert end["status"] == 0, end["err"]
    result = again.result()
    assert result is not None
    assert (result["weights_sha256"], json.loads(end["out"])) == (sha256, result)
    assert [s["sha256"] for s in again.lines("samples.jsonl")] == samples
    assert [m["step"] for m in again.lines("metrics.jsonl")] == list(range(1, STEPS + 1))
    joined = ["config.json", "journal.jsonl", "metrics.jsonl", "samples.jsonl", "status.json"]
    assert set(joined) <= set(again.folder.names())
    assert not [n for n in again.folder.names() if n[-1].isdigit()]  # no segment is left
    status = json.loads(again.elastic("status", again.place, "--json"))
    assert (status["phase"], status["committed_checkpoint"]) == ("finished", STEPS)
    assert again.elastic("checkpoint", "hash", again.place).strip() == sha256
    assert f"step {STEPS}: good" in again.elastic("checkpoint", "verify", again.place)
    assert str(STEPS) in again.elastic("checkpoint", "ls", again.place)
    assert "every decision is the same again" in again.elastic("replay", again.place)
    assert {"w0.log", "w1.log"} <= set(again.folder.at("logs").names()), "of killed workers, too"
    assert again.elastic("logs", again.place, "w0")
    assert leftovers(again.seen_pids) == []


@pytest.mark.slow
def test_an_outage_costs_saves_but_no_step_and_the_run_says_so(start_remote, s3, reference):
    with start_remote(workers=2, **OPTIONS) as run:
        run.wait_for_checkpoint(EVERY)
        s3.faults.errors, s3.faults.only = 1_000, f"step-{3 * EVERY:08}"
        end = run.finish(asleep=True)
    assert end["status"] == 0, end["err"]
    steps = run.catalogue.steps()  # those after it are skipped while it is tried again
    assert (steps[-1], len(steps), 3 * EVERY in steps) == (STEPS, 2, False)
    result = run.result()
    assert result is not None
    assert result["weights_sha256"] == reference(steps=STEPS)[0]
    warning = next(x for x in end["err"].splitlines() if x.startswith("elastic: warning:"))
    told = f"1 of [3456] saves failed, the last at step {3 * EVERY}: OSError: .* 500"
    assert re.search(told, warning)
    assert warning.endswith(f"the newest checkpoint is of step {STEPS}")
    reasons = [line["entry"]["reason"] for line in run.lines("journal.jsonl") if "entry" in line]
    assert any(f"checkpoint of step {3 * EVERY} failed" in reason for reason in reasons)
