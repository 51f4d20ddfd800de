"""What the composition root supplies to the cluster: where the run is kept, how it is recorded.

The implementation is elastic/controller/supervisor.py and elastic/controller/recorder.py.
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle

from elastic.control.detection.patience import Costly
from elastic.store.catalogue import Damage


@dataclass(frozen=True)
class Host:
    """Functions and facts of elastic/controller/supervisor.py, the composition root."""

    spawn: Callable[[int], ActorHandle[Any]]
    """Make the pending actor of worker number n."""
    begin_rendezvous: Callable[[], ActorHandle[Any]]
    """Make its actor; the one of before, if that lives."""
    spec_of: Callable[[int], Any]
    place: str
    """The run directory, whether it exists already or not."""
    settle: Callable[[], Awaitable[None]]
    """Wait until everything that was told so far, checkpoints too, is in the run directory."""
    on_loaded: Callable[[int, list[Damage]], Awaitable[str]]
    """The first worker's checks passed, or a later one starts again from an earlier step: make
    the run directory stand at that step, the damaged checkpoints set aside. Gives its place."""
    on_rolled_back: Callable[[int], None]
    """The members go on from this earlier step: later ones will be done again."""
    on_publish: Callable[[int, int, list[dict[str, Any]]], None]
    """generation, step, what the ranks reported of their parts"""
    on_discard: Callable[[int, int], None]
    on_step: Callable[[dict[str, Any]], None]
    """A committed step's record, exactly once per step, in order."""
    recorded_step: Callable[[], int]
    """Steps whose record this process's death cannot take along; at most those of `on_step`."""
    on_stacks: "Callable[[dict[str, str]], Future[Any] | None]"
    """Save files among the logs, by name. None if there is no run directory."""
    on_evaluation: Callable[[dict[str, Any]], None]
    on_unprotected: Callable[[dict[str, Any]], None]
    """Peer memory does not have the newest rows of all members, or has them again."""
    costly: Callable[[], tuple[Costly, ...]]
    """Where usual times say nothing now, by the ledger."""
    on_slow: Callable[[dict[str, Any]], None]
    """A worker is slow in such a place."""
