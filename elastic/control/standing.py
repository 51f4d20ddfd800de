"""Where a live worker says that it stands, for a controller that takes over.

What follows from it is in failover.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a live worker says that it stands, to a controller that it has not met before."""

    worker: int
    kind: str
    """One of KINDS."""
    generation: int = 0
    """Of which it is or was a member, the newest; 0: of none."""
    rank: int = 0
    world_size: int = 0
    step: int = 0
    """Committed steps of its state."""
    node: str = ""
    """In Ray's words; "" while it is starting."""
    origin: int = 0
    """The generation that computed `step`; 0 in old journals."""


KINDS = (
    "working",  # a member whose generation has formed and has not been given up
    "stopped",  # holds state, waits at a boundary: paused, done, suspended, forming
    "ended",  # a member that was told to write the final state
    "starting",  # builds the model
    "standby",  # without state
    "syncing",  # copying state
    "synced",  # following somebody
)
