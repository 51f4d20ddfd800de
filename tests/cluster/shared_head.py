"""A Ray head that the runs of a test process share: starting one takes longer than most runs."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.cluster.fork_server import ForkServer
from tests.cluster.forked_nodes import ForkedNodes
from tests.cluster.live import environment
from tests.cluster.processes import about, parent, running
from tests.object_store import CREDENTIALS

NUM_CPUS = 12
"""More than the workers, and what a run starts beside them, of any test."""
PATIENCE_S = 20.0
UNPREPARED = {"RAY_prestart_worker_first_driver": "0"}
"""No worker is started before it is asked for: without the folder of TARGET no run could use it."""
RAY_DATA = "ray::_"
"""Begins the titles of actors that Ray Data leaves on a cluster."""


class SharedHead:
    """Its address, and whether the runs before have left it as they found it."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._temp = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
        with pytest.MonkeyPatch.context() as patch:
            env = environment(self._temp) | CREDENTIALS | UNPREPARED
            for name, value in env.items():
                patch.setenv(name, value)
            options = {"num_cpus": NUM_CPUS, "object_store_memory": 200 * 2**20}
            options |= {"include_dashboard": False, "no_monitor": True}
            self._cluster = ForkedNodes(initialize_head=True, head_node_args=options)
        self.address: str = self._cluster.address

    def assert_empty(self) -> None:
        """Soon: what a run's end kills is gone a moment after its driver."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._actors()) and time.monotonic() < deadline:
            time.sleep(0.05)  # polling, bounded by the deadline
        assert found == [], f"left on the cluster: {found}"

    def _actors(self) -> list[str]:
        """The titles of the server's processes that are actors."""
        found = []
        for pid in running():
            title = about(pid, "cmdline").split(b"\0")[0].decode()
            is_ours = "Actor" in title and not title.startswith(RAY_DATA)
            if is_ours and self._server.pid in (parent(pid), parent(parent(pid))):
                found.append(f"{title} ({pid})")
        return found

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._temp, ignore_errors=True)
