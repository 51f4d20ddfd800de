# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The run's feed is started by the first worker that asks, and ended by the controller."""

from contextlib import suppress
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from elastic.on_ray.feed.order import FeedOrder
from elastic.on_ray.naming import NAMESPACE, end, find_actor

LAST_WRITE_S = 5.0


def start_feed(order: FeedOrder) -> ActorHandle[Any]:
    """The run's feed; the first worker that asks starts it."""
    from elastic.on_ray.feed.actor import FeedActor  # here: a controller, which only ends feeds,
    from elastic.on_ray.feed.dataset_actor import DatasetFeedActor  # begins without pyarrow

    return start_actor(FeedActor if order.source else DatasetFeedActor, order.run_id, order)


def start_actor(kind: type, run_id: str, *order: Any) -> ActorHandle[Any]:
    """The run's feed is of this kind; the first worker that asks starts it."""
    options: dict[str, Any] = {
        "name": feed_name(run_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
    }
    actor: Any = kind
    return cast(Any, ray.remote(actor).options(**options).remote(*order))


def feed_name(run_id: str) -> str:
    return f"{run_id}-feed"


def end_feed(run_id: str) -> None:
    """Its record is written first: a later part of the run compares the data with it. No error if
    there is none."""
    actor = find_actor(feed_name(run_id))
    if actor is not None:
        with suppress(RayError):  # lost, or it cannot write: the record saves reading only
            ray.get(cast(Any, actor).write_record.remote(), timeout=LAST_WRITE_S)
        end(actor)
