# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Faults that need the cluster: a signal on another node, a drain notice.

Whom to hit, and when, is decided in elastic/chaos.
"""

import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.on_ray.driver.submission import find_cluster, refuse_unreachable
from elastic.on_ray.placement.drain import drain_node
from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line

SIGNAL_TIMEOUT_S = 30.0


def join(address: str | None) -> None:
    """Connect this process to the run's cluster, once. WrongInput if none is found."""
    if ray.is_initialized():
        return
    address = address or find_cluster()
    if address is None:
        raise WrongInput("this needs the run's Ray cluster: give its --address")
    refuse_unreachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise WrongInput(f"Ray cannot be joined at address {address!r}: {error}") from error


def signal_process(node_id: str, pid: int, number: int) -> float:
    """Send a signal to a process on another node; the Unix time there just before.

    Raises what os.kill raises there, WrongInput if the node cannot be asked.
    """
    there: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(send)
    with asking(node_id):
        return float(ray.get(task.remote(pid, number), timeout=SIGNAL_TIMEOUT_S))


@contextmanager
def asking(node_id: str) -> Generator[None]:
    """What Ray raises about a node that has just died, or about what failed there, as ours."""
    try:
        yield
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, OSError):
            raise error.cause from None
        raise WrongInput(f"node {node_id} cannot be asked: {first_line(error)}") from error


def send(pid: int, number: int) -> float:
    """On the process's node. A status may be older than the process: only Ray's are signalled."""
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        if not command.read().startswith(b"ray::"):
            raise ProcessLookupError(f"process {pid} is no worker of Ray (any more)")
    at = time.time()
    os.kill(pid, number)
    return at


def drain(node_id: str, deadline_s: float) -> None:
    """Tell Ray that the node will go in `deadline_s`."""
    with asking(node_id):
        drain_node(node_id, "elastic chaos", deadline_s)
