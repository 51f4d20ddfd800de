"""Ray nodes of this machine whose workers come from the fork server, not from the interpreter.

Nobody asks their dashboard's agents, nor the head's dashboard: there is none. Their imports would
be most of what a node's start costs.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.cluster_utils import Cluster

GONE_S = 60.0
SETUP = str(Path(__file__).with_name("forked_worker.py"))
IDLE_AGENT = str(Path(__file__).with_name("idle_agent.py"))
interpreter = services._build_python_executable_command_memory_profileable


def fork_workers(options: RayParams, is_head: bool) -> None:
    """Ray calls it in `ray start`, where RAY_START_HOOK names it; that process ends then."""
    options.setup_worker_path = SETUP
    options.include_log_monitor = False
    options.ray_client_server_port = None
    for patch in patches():
        patch.start()


def command_of(component: str, *args: Any, **options: Any) -> list[str]:
    """What Ray puts before its own script, and that script's arguments, to start a component."""
    if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
        return [sys.executable, "-S", IDLE_AGENT]
    return interpreter(component, *args, **options)


def patches() -> list[Any]:
    """With which Ray starts nodes without what nobody asks there."""
    return [
        mock.patch.object(services, interpreter.__name__, command_of),
        mock.patch.object(Node, "start_api_server"),
    ]


@contextmanager
def small_nodes() -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches():
            stack.enter_context(patch)
        yield


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
        with small_nodes():
            return super().add_node(
                wait, setup_worker_path=SETUP, include_log_monitor=False, **options
            )
