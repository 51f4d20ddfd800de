"""The controller dies: training goes on, its successor takes over, and no step is lost."""

import os
import signal
import time

import pytest

from tests.cluster.live import assert_complete, leftovers

pytestmark = pytest.mark.cluster
STEPS = 400


def kill_controller(run) -> tuple[float, int]:
    """The moment and the process."""
    pid = run.status()["controller"]["pid"]
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at, pid


def await_successor(run, pid: int) -> dict:
    return run.wait_for(lambda s: s["controller"]["pid"] != pid and s["phase"] == "running")


def assert_as_if_nothing_had_happened(run, end, reference, steps: int = STEPS) -> None:
    sha256, samples = reference("Toy", steps=steps)
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == sha256
    assert end["result"]["lost_steps"] == 0
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, steps)
    assert leftovers(run.seen_pids) == []


def test_training_goes_on_while_the_controller_is_away(start, reference):
    with start("Toy", workers=3, steps=STEPS, checkpoint_every=50, set=["sleep=0.02"]) as run:
        run.wait_for(lambda s: s["step"] > 20)
        workers = [w["pid"] for w in run.status()["workers"]]
        _, pid = kill_controller(run)
        status = await_successor(run, pid)
        assert [w["pid"] for w in status["workers"]] == workers
        assert status["generation"] == 1
        end = run.finish()
    assert_as_if_nothing_had_happened(run, end, reference)
    assert end["result"]["generations"] == 1
    times = [m["time"] for m in run.lines("metrics.jsonl")]
    steps_s = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    assert steps_s[-1] < 20 * steps_s[len(steps_s) // 2], "training stood still"
