"""The fork server: what it starts is what the interpreter would have started."""

import os
import signal
import subprocess
import sys

import pytest

from tests.cluster.fork_server import Forked, Order
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


def test_a_forked_program_that_is_killed_is_known_as_such(fork_server, tmp_path, ray_temp):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(100)\n")
    order = Order([str(script)], environment(ray_temp), str(tmp_path), os.getpgid(0))
    forked = Forked(fork_server.address, order)
    assert os.getpgid(forked.pid) == os.getpgid(0)
    assert forked.poll() is None
    forked.kill()
    assert forked.wait(60) == -signal.SIGKILL
