"""A spot notice of rank 0's machine, from the address where a cloud's metadata server is."""

import os
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.cluster.hosts import Hosts, sh
from tests.cluster.live import JOBS
from tests.cluster.test_drain import STEPS, anywhere_and_idle, assert_left_as_planned, pace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HOSTS = partial(Hosts, 4, head_cpus=0)
"""A head, and three machines with one slot each."""
METADATA, PORT = "169.254.169.254", 80
NOTICE_S, DRAINED_S = 120.0, 2.0


@pytest.fixture
def clouds(hosts, tmp_path):
    """clouds(host) -> the file by which its cloud gives notice."""
    servers = []
    for host in range(1, hosts.count):
        sh("ip", "-n", hosts.name(host), "address", "add", f"{METADATA}/32", "dev", "lo")
        command = [sys.executable, "-m", "tests.metadata_server", "aws", METADATA, str(PORT)]
        server = subprocess.Popen(
            hosts.inside(host, *command, str(tmp_path / f"notice-{host}")),
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
            cwd=os.getcwd(),
        )
        assert server.stdout.readline() == "ready\n"
        servers.append(server)
    yield lambda host: tmp_path / f"notice-{host}"
    for server in servers:
        server.communicate(timeout=10)


@anywhere_and_idle
def test_the_machine_of_rank_0_is_left_in_time(hosts, clouds, reference, tmp_path, bound_s):
    hosts.start_ray()
    options = {"workers": 2, "standby": 1, "steps": STEPS, "max_failures": 0, "spot": "auto"}
    options |= pace(bound_s)
    with hosts.run(f"{JOBS / 'toy.py'}:Toy", tmp_path, "run", **options) as run:
        status = run.wait_for(
            lambda s: (
                s["world_size"] == 2
                and s["step"] > 5
                and [w["state"] for w in s["standby"]] == ["standby"]
            )
        )
        leaver = status["workers"][0]
        at = time.time()
        clouds(hosts.host_of(leaver["node_ip"])).write_text(str(NOTICE_S))
        status = run.wait_for(lambda s: leaver["id"] not in [w["id"] for w in s["workers"]])
        drained_s = time.time() - at
        print(f"drained after {drained_s:.2f} s")
        assert status["world_size"] == 2
        end = run.finish()
    told = [d["entry"]["reason"] for d in run.lines("journal.jsonl") if "entry" in d]
    assert [why for why in told if "aws takes its machine" in why]
    assert_left_as_planned(run, end, reference, at, bound_s)
    assert bound_s is None or drained_s < DRAINED_S
