"""A driver that is asked to stop and then killed, as `ray job stop` does after 3 s."""

import signal

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_complete
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
