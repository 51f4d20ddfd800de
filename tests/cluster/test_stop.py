"""A detached run: its controller's death, `elastic stop`, a controller that never comes back."""

import os
import signal
import time

import pytest

from tests.cluster.live import (
    JOBS,
    PATIENCE_S,
    LiveRun,
    assert_complete,
    elastic,
    environment,
    leftovers,
    python,
)
from tests.cluster.processes import sibling

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 100
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
LEASE_S = 10.0  # 10 x detect_s
END_CONTROLLERS = """
import ray
ray.init(address={address!r}, namespace="elastic", log_to_driver=False)
for actor in ray.util.list_named_actors():
    if actor.endswith("-controller"):
        ray.kill(ray.get_actor(actor), no_restart=True)
"""


def test_a_detached_run_is_taken_over_stopped_abandoned_and_resumed_to_the_same_bits(
    nodes, tmp_path, ray_temp, reference
):
    nodes.add_node(**NODE)
    where = {"address": nodes.address, "workers": 2, "steps": STEPS, "detect_s": 1.0}
    options = {**where, "checkpoint_every": 10, "set": ["sleep=0.2"]}
    target = f"{JOBS / 'toy.py'}:Toy"

    with LiveRun(target, tmp_path, "run", ray_temp, **options, detach=True) as run:
        assert run.process.wait(100) == 0
    until(lambda: run.status()["step"] > 5)
    former = run.status()["controller"]["pid"]
    os.kill(former, signal.SIGKILL)  # its driver is gone: nobody asks for a successor
    until(lambda: run.status()["controller"]["pid"] not in (None, former))
    step = run.status()["step"]
    until(lambda: run.status()["step"] > step + 3)
    stopped = elastic(run.env, "stop", run.directory, "--now")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped after" in stopped.stdout
    again = elastic(run.env, "stop", run.directory)
    assert (again.returncode, "ended already" in again.stdout) == (0, True), again.stderr

    with LiveRun(target, tmp_path, "run", ray_temp, **options, detach=True) as run:
        assert run.process.wait(100) == 0
    step = run.status()["step"]
    until(lambda: run.status()["step"] > step + 3 and run.status()["world_size"] == 2)
    pids = [w["pid"] for w in run.status()["workers"]]
    rendezvous = sibling(run.status()["controller"]["pid"], b"ray::RendezvousActor")
    script = tmp_path / "end_controllers.py"
    script.write_text(END_CONTROLLERS.format(address=nodes.address))
    done = python(run.env, script)
    assert done.returncode == 0, done.stderr
    at = time.monotonic()
    until(lambda: leftovers(pids) == [])
    assert time.monotonic() - at < LEASE_S + 30
    assert run.status()["step"] < STEPS, "it was abandoned, and had not ended by itself"

    with LiveRun(target, tmp_path, "run", ray_temp, **options) as run:
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == reference(steps=STEPS)[0]
    assert_complete(run, STEPS)
    until(lambda: leftovers([rendezvous]) == [])  # of the abandoned run


def until(what) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polling, bounded by the deadline


def test_stopping_what_is_no_run_is_one_line(tmp_path, ray_temp, fork_server):
    done = elastic(environment(ray_temp), "stop", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"elastic: {tmp_path} is no run directory: it has no config.json\n"
