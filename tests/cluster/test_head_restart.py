"""The head's node crashes and comes back under a detached run, with and without storage of its own.

Ray keeps what it knows in memory, unless RAY_gcs_storage says rocksdb (or redis).
"""

import json
import time
from functools import partial

import pytest

from tests.cluster.hosts import Hosts, command_of
from tests.cluster.live import JOBS, assert_complete, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
HOSTS = partial(Hosts, 3, head_cpus=0)
"""A head without slots and two hosts with one each."""

STEPS = 800
TOY = f"{JOBS / 'toy.py'}:Toy"
OPTIONS = {"workers": 2, "steps": STEPS, "checkpoint_every": 50, "set": ["sleep=0.02"]}
LEASE_S = 30.0  # 10 x detect_s


def begin(hosts, tmp_path):
    """A detached run that has come some way, and its workers' processes."""
    hosts.start_ray()
    with hosts.run(TOY, tmp_path, "run", detach=True, **OPTIONS) as run:
        assert run.process.wait(100) == 0
    until(lambda: run.status()["step"] > 60 and run.status()["world_size"] == 2, 60)
    return run, [w["pid"] for w in run.status()["workers"]]


def until(what, patience_s: float) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < patience_s
        time.sleep(0.05)  # polling, bounded by the deadline
    return time.monotonic() - began


def test_with_storage_the_workers_train_on_and_the_run_ends_as_if_nothing_had_been(
    hosts, tmp_path, reference
):
    hosts.head_env = {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(hosts.temp / "gcs"),
    }
    run, _ = begin(hosts, tmp_path)
    hosts.crash(0)
    hosts.start_raylet(0)
    took = until(lambda: (run.directory / "result.json").exists(), 150)
    print(f"the end came {took:.1f} s after the head's restart")
    result = json.loads((run.directory / "result.json").read_text())
    sha256, samples = reference(steps=STEPS)
    assert (result["outcome"], result["weights_sha256"]) == ("succeeded", sha256)
    assert [s["sha256"] for s in run.lines("samples.jsonl")] == samples
    assert_complete(run, STEPS)
    assert result["lost_steps"] == 0


def test_without_storage_everything_ends_within_the_lease_and_the_run_resumes(
    hosts, tmp_path, reference
):
    _, pids = begin(hosts, tmp_path)
    hosts.crash(0)
    took = until(lambda: leftovers(pids) == [], LEASE_S + 10)
    print(f"the workers were gone {took:.1f} s after the head")
    for host in (1, 2):
        hosts.crash(host)  # raylets without a head wait for it for a minute
    for host in range(3):
        hosts.start_raylet(host)
    with hosts.run(TOY, tmp_path, "run", **OPTIONS) as again:
        end = again.finish()
    assert end["status"] == 0, end["err"]
    assert end["result"]["weights_sha256"] == reference(steps=STEPS)[0]
    assert_complete(again, STEPS)
    assert [command_of(pid) for pid in leftovers(pids)] == []
