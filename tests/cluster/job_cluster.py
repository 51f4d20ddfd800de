"""A Ray head with its job server on the loopback, which a laptop reaches by HTTP only."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from contextlib import suppress
from pathlib import Path

from ray._private.parameter import RayParams

from tests.cluster.live import environment
from tests.cluster.processes import about, running
from tests.cluster.shared_head import UNPREPARED

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_emit_main_service_metrics": "0",
    "RAY_START_HOOK": "tests.cluster.job_cluster.leave_out",
    **UNPREPARED,
}
"""Of each call that its head answers Ray's agent makes a record of its own, by default."""


class JobCluster:
    """Use as a context manager; `lose` it, and `start` it again elsewhere, empty."""

    def __init__(self, folder: Path) -> None:
        """folder: for the Python of its nodes, an environment of its own: Ray copies that one for
        each set of requirements, and ours is large."""
        self.python = make_environment(folder / "venv")
        self.address = self.metrics = ""

    def __enter__(self) -> "JobCluster":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.lose()

    def start(self) -> None:
        self._temp = Path(tempfile.mkdtemp(prefix="ej-", dir="/tmp"))
        ports = free_ports(4)
        self.address = f"http://127.0.0.1:{ports[1]}"
        self.metrics = f"http://127.0.0.1:{ports[3]}"
        path = f"{self.python.parent}:{os.environ['PATH']}"
        env = environment(self._temp) | {"PATH": path, **SETTINGS}
        self._process = subprocess.Popen(
            [
                *(str(self.python), "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", f"--port={ports[0]}", "--num-cpus=4"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}"),
                *(
                    f"--dashboard-agent-listen-port={ports[2]}",
                    f"--metrics-export-port={ports[3]}",
                ),
                *(f"--temp-dir={self._temp}", f"--object-store-memory={100 * 2**20}"),
            ],
            env=env,
            stdout=(self._temp / "said").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        agent = f"http://127.0.0.1:{ports[2]}/api/local_raylet_healthz"  # who starts the jobs
        while not (answers(f"{self.address}/api/version") and answers(agent)):
            assert self._process.poll() is None, (self._temp / "said").read_text()
            assert time.monotonic() < deadline, self._agents_log()
            time.sleep(0.1)  # polling, bounded by the deadline

    def _agents_log(self) -> str:
        found = sorted(self._temp.glob("session_2*/logs/dashboard_agent.log"))
        return found[-1].read_text()[-5000:] if found else "it has none"

    def lose(self) -> None:
        """All its processes die at once: they are those whose command line names its folder."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)  # polling, bounded by the deadline
        shutil.rmtree(self._temp, ignore_errors=True)

    def processes(self) -> list[int]:
        names = (str(self._temp).encode(), f"RAY_TMPDIR={self._temp}".encode())
        found: list[int] = []
        for pid in running():
            with suppress(PermissionError):  # another user's
                is_named = names[0] in about(pid, "cmdline")
                if pid != os.getpid() and (is_named or names[1] in about(pid, "environ")):
                    found.append(pid)
        return found


def leave_out(options: RayParams, is_head: bool) -> None:
    """Ray calls it in `ray start`: nobody asks the server of Ray's client, nobody adds nodes, and
    what workers print is not copied to drivers, which do not ask for it."""
    options.ray_client_server_port = None
    options.no_monitor = True
    options.include_log_monitor = False


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def make_environment(folder: Path) -> Path:
    """Its Python, which finds what this one does."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    paths = [str(ROOT), *(p for p in sys.path if "site-packages" in p)]
    (packages / "shared.pth").write_text("\n".join(paths) + "\n")
    return folder / "bin" / "python"


def free_ports(count: int) -> list[int]:
    """None of those that connections are given, one of which would have it before Ray listens there
    (its agent goes on without, and no job can be submitted); and none of Ray's workers'."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found = [*found, port] if port not in found else found
    return found
