"""A driver that is killed, or asked to stop and then killed, as `ray job stop` does after 3 s."""

import signal
import time

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_complete, leftovers
from tests.cluster.test_stop import NODE, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MICROBATCH_S = 2.0
"""A step is longer than the driver's lease."""


def test_a_run_whose_driver_is_killed_after_it_was_asked_to_stop_saves_its_last_step(
    nodes, tmp_path, ray_temp
):
    nodes.add_node(**NODE)
    target, options = f"{JOBS / 'toy.py'}:Toy", {"address": nodes.address, "workers": 2}
    slow = {"steps": 30, "set": [f"sleep={MICROBATCH_S}"]}
    with LiveRun(target, tmp_path, "run", ray_temp, **options, **slow) as run:
        run.wait_for(lambda s: s["step"] >= 1)
        run.process.send_signal(signal.SIGTERM)
        run.wait_for(lambda s: "stop" in s["reason"])
        run.process.kill()
        until(lambda: (run.directory / "result.json").exists())
        step = run.status()["step"]
        assert run.finish()["result"]["outcome"] == "stopped"
        assert run.status()["committed_checkpoint"] == step
    assert_complete(run, step)


def test_a_run_whose_driver_is_killed_saves_its_last_step_and_is_gone_within_ten_seconds(
    nodes, tmp_path, ray_temp
):
    nodes.add_node(**NODE)
    target, options = f"{JOBS / 'toy.py'}:Toy", {"address": nodes.address, "workers": 2}
    with LiveRun(target, tmp_path, "run", ray_temp, **options, steps=10_000) as run:
        status = run.wait_for(lambda s: s["step"] >= 5)
        pids = run.seen_pids | {status["controller"]["pid"]}
        run.process.kill()
        killed_at = time.monotonic()
        until(lambda: not leftovers(pids))
        assert time.monotonic() - killed_at < 10
        step = run.status()["step"]
        assert (
            run.status()["committed_checkpoint"] == step == run.lines("metrics.jsonl")[-1]["step"]
        )
        assert run.status()["reason"] == "the driver is gone"
