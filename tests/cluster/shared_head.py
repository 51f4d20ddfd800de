"""A Ray head that the runs of a test process share: starting one takes longer than most runs."""

import contextlib
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.cluster.live import environment

NUM_CPUS = 12
"""More than the workers, and what a run starts beside them, of any test."""
PATIENCE_S = 20.0


class SharedHead:
    """Its address, and whether the runs before have left it as they found it."""

    def __init__(self, ray_temp: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(ray_temp).items():
                patch.setenv(name, value)
            # They would have no folder of a test's TARGET, so no run could use them.
            patch.setenv("RAY_prestart_worker_first_driver", "0")
            options = {"num_cpus": NUM_CPUS, "include_dashboard": False}
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args=options | {"object_store_memory": 200 * 2**20},
            )
        self.address: str = self._cluster.address
        self._raylet: int = self._pid_of_raylet()

    def _pid_of_raylet(self) -> int:
        node = self._cluster.head_node
        assert node is not None
        return node.all_processes["raylet"][0].process.pid

    def assert_empty(self) -> None:
        """Soon: what a run's end kills is gone a moment after its driver."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._actors()) and time.monotonic() < deadline:
            time.sleep(0.05)  # polling, bounded by the deadline
        assert found == [], f"left on the cluster: {found}"

    def _actors(self) -> list[str]:
        """The titles of its processes that are actors."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
                if parent == str(self._raylet) and "Actor" in title:
                    found.append(f"{title} ({entry.name})")
        return found

    def close(self) -> None:
        self._cluster.shutdown()
        assert not ray.is_initialized()
