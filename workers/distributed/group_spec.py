"""What a backend is told of a group that is to form. What a group is, is process_group.py's."""

import threading
from dataclasses import dataclass

from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.store import StoreClient


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Of one rank in a group to be."""

    store: StoreClient
    name: str
    rank: int
    world_size: int
    join_timeout_s: float
    operation_timeout_s: float
    """The backend's own limit per collective, a last resort only."""
    given_up: threading.Event
    """Nobody waits for the group any more."""


def name_of(spec: WorkerSpec, generation: int) -> str:
    """Of the process group of a generation, for its members and for torch."""
    return f"{spec.run_id}/{generation}"
