"""Faults of a whole node, on hosts of their own: the raylet killed, everything killed, a drain."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.cluster.hosts import GCS_PORT, Forbidden, Hosts, command_of
from tests.cluster.live import JOBS, assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
HOSTS = partial(Hosts, 4, head_cpus=0)
"""A head without slots and three hosts with one each."""

STEPS = 150
OPTIONS = {"workers": "2..3", "steps": STEPS, "detect_s": 3.0, "set": ["sleep=0.03"]}
LOADED_S = 5.0
"""1 s for a host and 2 s for a raylet on an idle machine, see tests/bench/faults.py."""


def kill_raylet(hosts, host: int) -> float:
    (raylet,) = (p for p in hosts.pids(host) if command_of(p).split(" ")[0].endswith("/raylet"))
    at = time.time()
    os.kill(raylet, signal.SIGKILL)
    return at


def drain(hosts, host: int) -> float:
    """A notice, and the end of the host at its deadline."""
    code = (
        "import ray, sys\n"
        "from elastic.on_ray.driver.remote_faults import drain, join\n"
        "join(sys.argv[1])\n"
        "drain(next(n['NodeID'] for n in ray.nodes() if n['NodeManagerAddress'] == sys.argv[2]), 6)"
    )
    command = [sys.executable, "-c", code, f"{hosts.address(0)}:{GCS_PORT}", hosts.address(host)]
    at = time.time()
    subprocess.run(hosts.inside(0, *command), check=True, timeout=60)
    time.sleep(max(0.0, at + 6 - time.time()))  # the notice
    hosts.crash(host)
    return at


@pytest.mark.parametrize("fault", [kill_raylet, Hosts.crash, drain])
def test_a_node_that_goes_costs_no_step(hosts, fault, tmp_path, reference, capsys):
    hosts.start_ray()
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **OPTIONS) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 20)
        at = fault(hosts, hosts.host_of(status["workers"][0]["node_ip"]))
        end = run.finish(asleep=True)
    assert end["status"] == 0, end["err"]
    after = next(m for m in run.lines("metrics.jsonl") if m["world_size"] == 2 and m["time"] > at)
    with capsys.disabled():
        print(f"\n{fault.__name__}: {after['time'] - at:.2f} s to the next step of two workers")
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    if fault is drain:
        assert end["result"]["recoveries"] == []
    else:
        assert [r["cause"] for r in end["result"]["recoveries"]] != ["heartbeat_silent"]
        assert after["time"] - at < LOADED_S


def test_a_host_that_its_peers_cannot_reach_is_the_one_that_goes(hosts, tmp_path, reference):
    """Rank 0's; driver and controller reach it."""
    hosts.start_ray()
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **OPTIONS) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 20)
        host = hosts.host_of(status["workers"][0]["node_ip"])
        assert host != hosts.host_running("ray::ControllerActor")
        try:
            for other in {1, 2, 3} - {host}:
                hosts.separate(host, other)
        except Forbidden as reason:
            pytest.skip(f"no path was cut: {reason}")
        left = run.wait_for(lambda s: s["world_size"] == 2 and s["phase"] == "running")
        end = run.finish(asleep=True)
    assert hosts.address(host) not in {w["node_ip"] for w in left["workers"]}
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0
    assert [r["cause"] for r in end["result"]["recoveries"]] == ["unreachable"]
