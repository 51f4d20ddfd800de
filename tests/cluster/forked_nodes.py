"""Ray nodes of this machine whose workers come from the fork server, not from the interpreter.

Their agents load no modules, as where `ray[default]` is not installed: nobody asks them, and their
imports are most of what a node's start costs.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import ray._private.utils as of_ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.cluster_utils import Cluster

GONE_S = 60.0
SETUP = str(Path(__file__).with_name("forked_worker.py"))


def fork_workers(options: RayParams, is_head: bool) -> None:
    """Ray calls it in `ray start`, where RAY_START_HOOK names it; that process ends then."""
    options.setup_worker_path = SETUP
    options.include_log_monitor = False
    small_agents().start()


def small_agents() -> Any:
    """A patch, within which nodes are started."""
    lacking = ImportError("the tests' agents load no modules")
    return mock.patch.object(of_ray, "get_dashboard_dependency_error", return_value=lacking)


class ForkedNodes(Cluster):
    """As Ray's Cluster. FORK_SERVER must be in the environment while nodes are added."""

    def crash(self) -> None:
        """All processes of its nodes are gone at once, as with the power."""
        nodes = [self.head_node, *self.worker_nodes]
        for started in [p for node in nodes for p in node.all_processes.values()]:
            for one in started:
                one.process.kill()

    def remove_nodes(self) -> None:
        """All but the head; and Ray knows that they are gone."""
        for node in list(self.worker_nodes):
            self.remove_node(node)
        self.wait_for_nodes(GONE_S)

    def add_node(self, wait: bool = True, **options: Any) -> Node:
        # what workers print is not copied to drivers, which do not ask for it
        with small_agents():
            return super().add_node(
                wait, setup_worker_path=SETUP, include_log_monitor=False, **options
            )
