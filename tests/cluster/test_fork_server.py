"""The fork server: what it starts is what the interpreter would have started."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.fork_client import Order
from tests.cluster.fork_server import Forked
from tests.cluster.live import environment

pytestmark = pytest.mark.cluster

SCRIPT = """
import json, os, signal, sys
about = {
    "name": __name__, "file": __file__, "arguments": sys.argv, "path": sys.path[0],
    "folder": os.getcwd(), "env": dict(os.environ), "leads": os.getsid(0) == os.getpid(),
    "files": sorted(os.listdir("/proc/self/fd"))[:3], "imported": "ray" in sys.modules,
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
}
print(json.dumps(about, indent=1, sort_keys=True))
print("to the other", file=sys.stderr)
sys.exit(3)
"""

OF_RAY = """
import json, os, sys
was_imported = "ray" in sys.modules
import ray
from ray._private import ray_constants
about = {
    "level": ray_constants.LOGGER_LEVEL, "period": ray._raylet.Config.health_check_period_ms(),
    "env": dict(os.environ), "path": sorted(sys.path), "arguments": sys.argv,
}
print(json.dumps([was_imported, ray.NodeID.from_random().hex(), about]))
"""


def test_a_forked_program_is_what_the_interpreter_would_have_started(
    fork_server, tmp_path, ray_temp
):
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(SCRIPT)
    folder.mkdir()
    env = environment(ray_temp) | {"PYTHONPATH": str(tmp_path)}
    order = Order([str(script), "--first", "second one"], env, str(folder))
    started = subprocess.run(
        [sys.executable, *order.arguments],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    forked = Forked(fork_server.address, order)
    assert (forked.wait(60), *forked.communicate()) == (3, started.stdout, started.stderr)


def test_ray_was_imported_in_the_environment_of_the_forked_program(fork_server, tmp_path, ray_temp):
    script = tmp_path / "script.py"
    script.write_text(OF_RAY)
    for own in ({}, {"RAY_LOGGER_LEVEL": "debug", "RAY_health_check_period_ms": "777"}):
        order = Order([str(script)], environment(ray_temp) | own, str(tmp_path))
        command = [sys.executable, *order.arguments]
        started = subprocess.run(command, env=order.env, capture_output=True, check=True)
        *_, expected = json.loads(started.stdout)
        forked = [Forked(fork_server.address, order, with_ray=True) for _ in range(2)]
        assert [one.wait(60) for one in forked] == [0, 0]
        found = [json.loads(one.communicate()[0]) for one in forked]
        assert [about for _, _, about in found] == [expected] * 2
        assert all(was_imported for was_imported, _, _ in found)
        assert found[0][1] != found[1][1], "what is drawn at random"


def test_a_forked_program_that_is_killed_is_known_as_such(fork_server, tmp_path, ray_temp):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(100)\n")
    order = Order([str(script)], environment(ray_temp), str(tmp_path), os.getpgid(0))
    forked = Forked(fork_server.address, order)
    assert os.getpgid(forked.pid) == os.getpgid(0)
    assert forked.poll() is None
    forked.kill()
    assert forked.wait(60) == -signal.SIGKILL
