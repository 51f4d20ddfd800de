"""Slots on a cluster of several nodes: shipping the code, growth, foreign load, detached runs."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_complete, assert_gone, elastic, environment

pytestmark = pytest.mark.cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster(nodes):
    """A head without slots and one node with one."""
    nodes.add_node(**NODE)
    return nodes


def other_folder(tmp_path):
    """The job's file in a folder that only the driver knows."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "helper_of_mine.py").write_text("SCALE = 1.0\n")
    text = (JOBS / "toy.py").read_text()
    (folder / "mine.py").write_text(f"import helper_of_mine\n{text}")
    return folder / "mine.py"


def test_a_node_that_joins_is_filled_by_itself(cluster, tmp_path, ray_temp, reference):
    target = f"{other_folder(tmp_path)}:Toy"
    with LiveRun(
        target,
        tmp_path,
        "run",
        ray_temp,
        address=cluster.address,
        workers="1..2",
        steps=60,
        set=["sleep=0.1"],
    ) as run:
        status = run.wait_for(lambda s: s["step"] > 5)
        assert status["world_size"] == 1
        assert [w["state"] for w in status["standby"]] == ["pending"]
        cluster.add_node(**NODE)
        run.wait_for_step(lambda s: s["world_size"] == 2)
        end = run.finish()
        pids = run.seen_pids
    assert end["status"] == 0, end["err"]
    assert_complete(run, 60)
    assert_gone(pids)
    assert end["result"]["weights_sha256"] == reference(steps=60)[0]


def test_capacity_that_others_hold_does_not_block_a_start_at_min(cluster, tmp_path, ray_temp):
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG.format(address=cluster.address)],
        stdout=subprocess.PIPE,
        env=environment(ray_temp),
        text=True,
    )
    cluster.add_node(**NODE)
    try:
        assert hog.stdout.readline() == "held\n"
        with LiveRun(
            f"{JOBS / 'toy.py'}:Toy",
            tmp_path,
            "run",
            ray_temp,
            address=cluster.address,
            workers="1..2",
            steps=20,
        ) as run:
            end = run.finish()
        assert end["status"] == 0, end["err"]
        assert {m["world_size"] for m in run.lines("metrics.jsonl")} == {1}
    finally:
        hog.kill()
        hog.wait()


HOG = """
import ray, time
ray.init(address={address!r}, log_to_driver=False)
@ray.remote(num_cpus=1)
class Hog:
    def ready(self): return True
hog = Hog.remote()
ray.get(hog.ready.remote())
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_detached_run_outlives_its_driver_and_can_be_watched(cluster, tmp_path, ray_temp):
    with LiveRun(
        f"{JOBS / 'toy.py'}:Toy",
        tmp_path,
        "run",
        ray_temp,
        address=cluster.address,
        workers=1,
        steps=300,
        set=["sleep=0.01"],
        detach=True,
    ) as run:
        assert run.process.wait(100) == 0
    directory = tmp_path / "run"
    assert run.status()["step"] < 300
    watch = elastic(run.env, "watch", directory)
    assert watch.returncode == 0, watch.stderr
    assert "300" in watch.stdout
    assert json.loads((directory / "result.json").read_text())["outcome"] == "succeeded"
    status = json.loads((directory / "status.json").read_text())
    assert_gone([status["controller"]["pid"]])


def test_two_runs_on_one_cluster_never_meet(cluster, tmp_path, ray_temp):
    cluster.add_node(**NODE)
    options = {"address": cluster.address, "workers": 1, "steps": 30}
    target = f"{JOBS / 'toy.py'}:Toy"
    with (
        LiveRun(target, tmp_path, "one", ray_temp, **options) as one,
        LiveRun(target, tmp_path, "two", ray_temp, **options) as two,
    ):
        ends = [one.finish(), two.finish()]
    assert [end["status"] for end in ends] == [0, 0], [end["err"] for end in ends]
    assert len({end["result"]["weights_sha256"] for end in ends}) == 1


def test_the_same_run_alive_elsewhere_is_refused(cluster, tmp_path, ray_temp):
    options = {"address": cluster.address, "workers": 1, "steps": 2000, "set": ["sleep=0.01"]}
    target = f"{JOBS / 'toy.py'}:Toy"
    with LiveRun(target, tmp_path, "run", ray_temp, **options) as run:
        run.wait_for(lambda s: s["step"] > 1)
        with LiveRun(target, tmp_path, "run", ray_temp, **options) as second:
            assert second.finish()["status"] == 2
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.finish()["result"]["outcome"] == "stopped"
