"""A run over three hosts with their own addresses, and what happens to it when links fail."""

import json
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.cluster.hosts import Forbidden, Hosts
from tests.cluster.live import JOBS, assert_same_bits

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HOSTS = partial(Hosts, 3)
"""Three of them with one CPU slot each."""

STEPS = 40


def is_reached(hosts, source: int, target: int) -> bool:
    """One TCP answer in time: refused counts, silence does not."""
    connect = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), timeout=3)\n"
        "except ConnectionRefusedError: print('answered')\n"
        "except OSError: pass\n"
    )
    command = hosts.inside(source, "python3", "-c", connect, hosts.address(target))
    return "answered" in subprocess.run(command, capture_output=True, text=True, timeout=10).stdout


def test_links_are_cut_mended_and_lossy_and_nothing_is_left(hosts):
    assert is_reached(hosts, 0, 1)
    hosts.cut(1)
    assert not is_reached(hosts, 0, 1)
    assert is_reached(hosts, 0, 2)
    hosts.mend(1)
    assert is_reached(hosts, 0, 1)
    hosts.throttle(1, "10mbit")
    assert is_reached(hosts, 0, 1)
    hosts.delay(2, 200)
    began = time.monotonic()
    assert is_reached(hosts, 0, 2)
    assert time.monotonic() - began > 0.4, "there and back"
    hosts.cut(2)
    assert not is_reached(hosts, 0, 2)
    try:
        hosts.lose(1, 1.0, outgoing=False)
    except Forbidden as reason:
        pytest.skip(f"loss was not tried: {reason}")
    assert not is_reached(hosts, 0, 1)
    hosts.lose(1, 0.0)
    assert is_reached(hosts, 0, 1)


def names() -> list[str]:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()


def test_namespaces_do_not_outlive_their_hosts():
    """Other tests may have some whose names begin alike."""
    try:
        with Hosts(2) as hosts:
            own = {hosts.switch, hosts.name(0), hosts.name(1)}
            assert own <= set(names())
    except Forbidden as reason:
        pytest.skip(f"no hosts on this machine: {reason}")
    assert own.isdisjoint(names())


def test_a_cut_link_costs_seconds_and_no_step(hosts, reference, tmp_path, capsys):
    """The host keeps running and says nothing: only heartbeats can tell."""
    hosts.start_ray()
    options = {"workers": "2..3", "steps": STEPS, "detect_s": 2.0, "set": ["sleep=0.05"]}
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **options) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        assert len({w["node_ip"] for w in status["workers"]}) == 3
        run.wait_for(lambda s: s["step"] > 12)  # before, no phase has a usual time
        controller = hosts.host_running("ray::ControllerActor")
        assert controller == hosts.host_running("ray::RendezvousActor")
        at = hosts.cut(next(h for h in range(3) if h not in (0, controller)))
        end = run.finish()
    assert end["status"] == 0, end["err"]
    after = next(m for m in run.lines("metrics.jsonl") if m["time"] > at and m["world_size"] == 2)
    with capsys.disabled():
        print(f"\nlink cut: {after['time'] - at:.2f} s to the next step; {end['result']}")
    assert_same_bits(run, end, reference(steps=STEPS), STEPS)
    assert end["result"]["lost_steps"] == 0


@pytest.mark.slow
def test_chaos_reaches_other_hosts_through_ray(hosts, tmp_path):
    """A worker killed on another host, and a node that is given notice."""
    address = hosts.start_ray()
    scenario = tmp_path / "scenario.yaml"
    options = {"workers": "2..3", "steps": STEPS, "detect_s": 2.0, "set": ["sleep=0.05"]}
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **options) as run:
        status = run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        victim = next(w for w in status["workers"] if w["node_ip"] != hosts.address(0))
        scenario.write_text(
            "faults:\n"
            f"  - {{what: kill, whom: {{rank: {victim['rank']}}}, when: {{step: 8}}}}\n"
            "  - {what: drain, whom: {node_of: 0}, for_s: 5, when: {after_fault: 1, step: 10}}\n"
        )
        command = [sys.executable, "-m", "elastic", "chaos", str(scenario), str(run.directory)]
        done = subprocess.run(
            hosts.inside(0, *command, "--address", address),
            env=run.env,
            capture_output=True,
            text=True,
            timeout=150,
        )
        end = run.finish()
    assert end["status"] == 0, end["err"]
    assert done.returncode == 0, done.stderr
    notes = [(line["what"], line["note"]) for line in run.lines("chaos.jsonl")]
    assert notes == [("kill", ""), ("drain", "")]
    report = json.loads((run.directory / "chaos-report.json").read_text())
    assert report["faults"][0]["result"] == "recovered", report["faults"]


@pytest.mark.slow
def test_chaos_cuts_a_link_and_makes_it_lossy_and_the_node_mends_it(hosts, reference, tmp_path):
    """Through Ray, which loses the node's answers, too."""
    address = hosts.start_ray()
    scenario = tmp_path / "scenario.yaml"
    options = {"workers": "2..3", "steps": 100, "detect_s": 2.0, "set": ["sleep=0.1"]}
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **options) as run:
        run.wait_for(lambda s: s["world_size"] == 3 and s["step"] > 5)
        controller = hosts.host_running("ray::ControllerActor")
        victim = next(h for h in range(1, 3) if h != controller)
        rows = run.status()["workers"]
        rank = next(w["rank"] for w in rows if w["node_ip"] == hosts.address(victim))
        whom = f"whom: {{node_of: {rank}}}"
        scenario.write_text(
            "faults:\n"
            f"  - {{what: lossy, loss: 0.05, for_s: 4, {whom}, when: {{step: 8}}}}\n"
            f"  - {{what: cut, for_s: 6, {whom}, when: {{after_fault: 1, after_s: 6}}}}\n"
        )
        command = [sys.executable, "-m", "elastic", "chaos", str(scenario), str(run.directory)]
        chaos = subprocess.Popen(
            hosts.inside(0, *command, "--address", address),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
            env=run.env,
        )
        run.wait_for_step(lambda s: s["world_size"] == 2)
        end = run.finish()
        out, err = chaos.communicate(timeout=60)
    assert chaos.returncode == 0, err
    assert_same_bits(run, end, reference(steps=100), 100)
    assert end["result"]["lost_steps"] == 0
    notes = [(line["what"], line["note"]) for line in run.lines("chaos.jsonl")]
    assert notes == [("lossy", ""), ("cut", "")], out
    rules = subprocess.run(
        hosts.inside(victim, "iptables", "-S"), capture_output=True, text=True, check=True
    ).stdout
    assert "elastic-chaos" not in rules
    report = json.loads((run.directory / "chaos-report.json").read_text())
    assert report["faults"][1]["result"] == "recovered", report["faults"]
