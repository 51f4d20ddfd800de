"""Workers under notice: SIGTERM, and nodes that Ray drains. It is planned, so nothing is lost."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.live import JOBS, LiveRun, assert_same_bits, leftovers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEPS = 200
OPTIONS = {"workers": "2..3", "steps": STEPS, "max_failures": 0, "set": ["sleep=0.02"]}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
LOADED_S = 5.0
"""A gap beside other tests on two cores, where each of two regroups has taken over a second; what
it is on an idle machine, tests/bench/faults.py measures."""


def longest_gap_s(run, since: float) -> float:
    """Between two commits, the median step taken off."""
    times = [m["time"] for m in run.lines("metrics.jsonl")]
    gaps = sorted(b - a for a, b in itertools.pairwise(times) if b > since)
    return gaps[-1] - gaps[len(gaps) // 2]


def assert_left_as_planned(run, end, reference, since: float) -> None:
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert (end["result"]["lost_steps"], end["result"]["recoveries"]) == (0, [])
    gap_s = longest_gap_s(run, since)
    print(f"longest gap {gap_s:.3f} s")
    assert gap_s < LOADED_S
    assert leftovers(run.seen_pids) == []


def test_sigterm_to_a_worker_is_a_notice_and_its_replacement_takes_its_place(start, reference):
    with start("Toy", standby=1, **OPTIONS) as run:
        status = run.wait_for(
            lambda s: s["world_size"] == 3 and [w["state"] for w in s["standby"]] == ["standby"]
        )
        leaver = status["workers"][0]
        at = time.time()
        os.kill(leaver["pid"], signal.SIGTERM)
        status = run.wait_for(lambda s: leaver["id"] not in [w["id"] for w in s["workers"]])
        assert (status["world_size"], status["generation"]) == (3, status["generation"])
        end = run.finish()
    assert_left_as_planned(run, end, reference, at)


def drain(cluster, node_id: str, deadline_s: int) -> subprocess.Popen:
    """As an autoscaler does it; the process that asks."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address"]
    command += [cluster.address, "--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "spot", "--deadline-remaining-seconds", str(deadline_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_node(cluster, node_id: str) -> None:
    """What the cloud does at the deadline."""
    for node in list(cluster.worker_nodes):
        if node.node_id == node_id:
            cluster.remove_node(node, allow_graceful=False)


def test_rank_0s_node_and_another_are_drained_within_a_second(nodes, tmp_path, ray_temp, reference):
    for _ in range(3):
        nodes.add_node(**NODE)
    where = {"address": nodes.address, **OPTIONS, "workers": "1..3"}
    with LiveRun(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", ray_temp, **where) as run:
        status = run.wait_for(lambda s: s["step"] > 20 and s["world_size"] == 3)
        leaving = [w["node_id"] for w in status["workers"][:2]]
        assert len(set(leaving)) == 2
        at = time.time()
        for asking in [drain(nodes, node_id, 12) for node_id in leaving]:
            out, _ = asking.communicate(timeout=60)
            assert asking.returncode == 0, out
        run.wait_for(lambda s: {w["node_id"] for w in s["workers"]}.isdisjoint(leaving))
        for node_id in leaving:
            end_node(nodes, node_id)
        end = run.finish()
    assert_left_as_planned(run, end, reference, at)
