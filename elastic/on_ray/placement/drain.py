# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The drain watch: nodes that Ray was told will go, by `ray drain-node`, an autoscaler or KubeRay.

It only says so: what becomes of the workers there is elastic/control's.
"""

import asyncio
import logging
import math
import time
from typing import Any, cast

from ray.exceptions import RayError

from elastic.control.events import DrainNotice
from elastic.on_ray.cluster_view import ClusterView
from elastic.protocol.errors import WrongInput

POLL_S = 0.25
ANSWER_S = 5.0
NO_DEADLINE_S = 60.0
"""How long a node stays at least that is drained without a deadline: an assumption."""

log = logging.getLogger(__name__)


def draining_nodes() -> dict[str, float | None]:
    """The nodes under a drain notice, and when they go (Unix time); None: nobody says.

    Private API of Ray, this place only. RayError if the head does not answer.
    """
    from ray._private.worker import global_worker

    client: Any = cast(Any, global_worker).gcs_client
    found: dict[str, int] = client.get_draining_nodes(timeout=ANSWER_S)
    return {node: deadline / 1000 if deadline else None for node, deadline in found.items()}


def drain_node(node_id: str, why: str, left_s: float) -> None:
    """Tell Ray that the node goes in `left_s`: nothing is placed there any more. Private API of
    Ray, this place only. WrongInput if Ray refuses, RayError if the head does not answer."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2  # pyright: ignore

    notice: Any = autoscaler_pb2
    reason = notice.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + left_s))
    client: Any = cast(Any, global_worker).gcs_client
    is_accepted, answer = client.drain_node(node_id, reason, why, deadline_ms)
    if not is_accepted:
        raise WrongInput(f"Ray refused to drain node {node_id}: {answer}")


async def watch_drains(cluster: ClusterView) -> None:
    """Tell of every worker's notice, and again if the deadline is brought forward."""
    loop = asyncio.get_running_loop()
    told: dict[int, float] = {}
    while True:
        await asyncio.sleep(POLL_S)
        try:
            nodes = await loop.run_in_executor(None, draining_nodes)
        except (RayError, RuntimeError, OSError) as error:  # the head is away: ask again
            log.warning('drain watch reason="%s"', error)
            continue
        now = cluster.now()
        for worker, slot in tuple(cluster.workers.items()):
            if slot.node_id not in nodes:
                continue
            deadline = nodes[slot.node_id] or now + NO_DEADLINE_S
            if deadline < told.get(worker, math.inf):
                told[worker] = deadline
                cluster.say(DrainNotice(worker, "its node is drained", deadline, now))
