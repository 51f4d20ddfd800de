# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Actors of a run by name: where they are found, and how they are ended."""

from typing import Any

import ray
from ray.actor import ActorHandle

NAMESPACE = "elastic"


def find_actor(name: str) -> ActorHandle[Any] | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end(actor: ActorHandle[Any]) -> None:
    ray.kill(actor, no_restart=True)


def this_host() -> str:
    """The address of this node, as the others reach it."""
    return ray.util.get_node_ip_address()
