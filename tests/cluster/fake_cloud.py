"""A cloud of this machine: Ray's own autoscaler makes nodes and takes them away, as it does in one.

Its nodes are raylets, made by Ray's fake provider with the tests' forked workers. `FakeCloud` is
the tests' side; `Instances` runs in Ray's monitor process, which finds it by its name.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import GcsClient
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FakeMultiNodeProvider,
)
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)
from ray.core.generated import autoscaler_pb2

from tests.cluster.forked_nodes import SETUP, ForkedNodes, small_nodes
from tests.cluster.live import environment, leftovers

ROOT = Path(__file__).parents[2]
STORE_BYTES = 80 * 2**20
HEAD, SPOT = "head", "spot"
COMMANDS = ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
"""What Ray would run on a node, all of which it wants named."""
IDLE_MINUTES = 0.05
NOTICED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""How soon Ray knows of a raylet that was killed."""


class Instances(FakeMultiNodeProvider):
    """Ray's provider of fake nodes, whose workers are forked. A file per instance tells its raylet.

    provider_config: `folder`, where the files are.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        given = next(a for a in sys.argv if a.startswith("--gcs-address="))
        address = given.partition("=")[2]
        super().__init__({**provider_config, "gcs_address": address}, cluster_name)
        self._folder = Path(provider_config["folder"])
        self._nodes = {FAKE_HEAD_NODE_ID: {"tags": tags(FAKE_HEAD_NODE_ID, NODE_KIND_HEAD, HEAD)}}

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags_: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        for _ in range(count):
            self._make(tags_, copy.deepcopy(resources), labels)

    def _make(
        self, asked: dict[str, str], resources: dict[str, Any], labels: dict[str, str]
    ) -> None:
        with self.lock:
            node_id = self._next_hex_node_id()
            kind = asked[TAG_RAY_USER_NODE_TYPE]
            params = RayParams(
                gcs_address=self._gcs_address,
                redis_address=self._gcs_address,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                object_store_memory=STORE_BYTES,
                resources={k: v for k, v in resources.items() if k != "memory"},
                labels=labels,
                min_worker_port=0,
                max_worker_port=0,
                setup_worker_path=SETUP,
                include_log_monitor=False,
                env_vars={
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id,
                    "RAY_CLOUD_INSTANCE_ID": node_id,
                    "RAY_NODE_TYPE_NAME": kind,
                },
            )
            with small_nodes():
                node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
            self._nodes[node_id] = {
                "tags": {**tags(node_id, NODE_KIND_WORKER, kind), **asked},
                "node": node,
            }
            raylet = node.all_processes["raylet"][0].process.pid
            (self._folder / node_id).write_text(json.dumps({"pid": raylet, "made": time.time()}))

    def terminate_node(self, node_id: str) -> None:
        super().terminate_node(node_id)
        (self._folder / node_id).unlink(missing_ok=True)


def tags(node_id: str, role: str, kind: str) -> dict[str, str]:
    return {
        TAG_RAY_NODE_KIND: role,
        TAG_RAY_USER_NODE_TYPE: kind,
        TAG_RAY_NODE_NAME: node_id,
        TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
    }


class FakeCloud:
    """A head without slots whose autoscaler may have `max_nodes` of one CPU each. `close` ends all
    that it has made.

    v2: which of Ray's autoscalers. The fork server's address must be in the environment.
    """

    def __init__(self, max_nodes: int = 3, *, v2: bool = True) -> None:
        self.is_v2 = v2
        self.temp = Path(tempfile.mkdtemp(prefix="ea-", dir="/tmp"))
        self._instances = self.temp / "instances"
        self._instances.mkdir()
        config = self.temp / "cluster.yaml"
        config.write_text(yaml.safe_dump(self._config(max_nodes)))
        env = environment(self.temp) | NOTICED
        env |= {
            "PYTHONPATH": str(ROOT),
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": str(int(v2)),
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_NODE_TYPE_NAME": HEAD,
            "RAY_prestart_worker_first_driver": "0",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            head = {"num_cpus": 0, "include_dashboard": False, "autoscaling_config": str(config)}
            self._cluster = ForkedNodes(
                initialize_head=True, head_node_args={**head, "object_store_memory": STORE_BYTES}
            )
        self.address: str = self._cluster.address

    def _config(self, max_nodes: int) -> dict[str, Any]:
        return {
            "cluster_name": "fake",
            "max_workers": max_nodes,
            "idle_timeout_minutes": IDLE_MINUTES,
            "upscaling_speed": 100.0,
            "head_node_type": HEAD,
            "initialization_commands": [],
            "cluster_synced_files": [],
            "file_mounts": {},
            "rsync_exclude": [],
            "rsync_filter": [],
            "auth": {},
            **{f"{name}_commands": [] for name in COMMANDS},
            "provider": {
                "type": "external",
                "module": "tests.cluster.fake_cloud.Instances",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "folder": str(self._instances),
            },
            "available_node_types": {
                HEAD: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                SPOT: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": max_nodes},
            },
        }

    def nodes(self) -> dict[str, int]:
        """Those that are paid for: each one's raylet, by the node's id."""
        found = {}
        for path in self._instances.iterdir():
            with contextlib.suppress(FileNotFoundError, ValueError):  # gone, or half written
                found[path.name] = json.loads(path.read_text())["pid"]
        return found

    def take(self, node_id: str) -> float:
        """The machine is gone at once; returns the Unix time."""
        at = time.time()
        os.kill(self.nodes()[node_id], signal.SIGKILL)
        return at

    def give_notice(self, node_id: str, deadline_s: float) -> None:
        """As clouds do of a spot machine: it goes then, and takes nothing new."""
        client = GcsClient(address=self.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + deadline_s) * 1000)
        is_accepted, why = client.drain_node(node_id, reason, "spot", deadline_ms)
        assert is_accepted, why

    def wait_until_empty(self, patience_s: float) -> float:
        """Seconds until no node is left; fails the test if some are left after patience_s."""
        since = time.monotonic()
        while left := self.nodes():
            assert time.monotonic() - since < patience_s, f"left after {patience_s} s: {left}"
            time.sleep(0.1)  # polling, bounded by the deadline
        return time.monotonic() - since

    def log(self) -> str:
        """What the autoscaler wrote."""
        found = sorted(self.temp.glob("ray/session_2*/logs/monitor.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in found)

    def close(self) -> None:
        self._cluster.shutdown()  # the autoscaler first: nobody makes a node any more
        raylets = self.nodes().values()
        for pid in raylets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while leftovers(raylets) and time.monotonic() < deadline:
            time.sleep(0.05)  # polling, bounded by the deadline
        shutil.rmtree(self.temp, ignore_errors=True)
