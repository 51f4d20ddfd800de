"""How a small run is limited and begins; what becomes of it is each test's own."""

from elastic.control.events import Committed, Event, Joined, Loaded, Paused, Synced, WorkerStarted
from elastic.control.state import Limits

LIMITS = Limits(
    min_workers=1,
    max_workers=2,
    standby=0,
    steps=4,
    max_failures=2,
    join_timeout_s=30,
    end_timeout_s=30,
    confirm_timeout_s=3,
)
BEGIN: list[Event] = [
    WorkerStarted(0, 2.0),
    Loaded(0, 0, 3.0),
    Joined(1, 0, 0.0, 4.0),
    WorkerStarted(1, 4.0),
    Committed(1, 1, 1.0, 6.0),
    Synced(1, 6.5),
    Committed(1, 2, 1.0, 7.0),
    Paused(1, 0, 2, 7.0),
    Joined(2, 0, 0.0, 7.25),
    Joined(2, 1, 0.1, 7.5),
]
"""One worker trains, and after two steps another joins it."""
