"""Ray nodes of this machine whose workers come from the fork server, not from the interpreter."""

from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray.cluster_utils import Cluster

SETUP = str(Path(__file__).with_name("forked_worker.py"))


class ForkedNodes(Cluster):
    """As Ray's Cluster. FORK_SERVER must be in the environment while nodes are added."""

    def add_node(self, wait: bool = True, **options: Any) -> Node:
        # what workers print is not copied to drivers, which do not ask for it
        return super().add_node(wait, setup_worker_path=SETUP, include_log_monitor=False, **options)
