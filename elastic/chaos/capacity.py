"""Room for so many workers: slots of the cluster are held by somebody else, and given back.

Who holds them is elastic/on_ray/driver/placeholders.py's, when a trace wants which is plan.py's.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Protocol

from elastic.config import Resources
from elastic.protocol.errors import WrongInput
from elastic.protocol.placing import Need

SETTLE_S = 0.5
"""How long Ray may take to hear of a placeholder: it gets a slot only if it waits for one."""
AGAIN_S = 3.0
"""After so long a worker that has come into the slot of one that was taken away goes, too."""


class Holders(Protocol):
    """Who takes slots."""

    def total(self) -> int:
        """How many workers the cluster could hold if it were empty."""
        ...

    def hold(self, count: int) -> None:
        """So many slots are held, or waited for, from now on."""
        ...


class Capacity:
    """What the run is left of the cluster. `make_room` says how much; whoever is too many then is
    told by `num_excess`, and killed by the caller."""

    def __init__(self, holders: Callable[[], Holders]) -> None:
        """holders: called once, at the first fault."""
        self._make = holders
        self._holders: Holders | None = None
        self._room = 0
        self._next_at = inf

    def make_room(self, room: int, now: float) -> None:
        """For so many workers. now: monotonic seconds. WrongInput if the cluster is too large."""
        self._holders = self._holders or self._make()
        self._holders.hold(max(0, self._holders.total() - room))
        self._room, self._next_at = room, now + SETTLE_S

    def num_excess(self, num_placed: int, now: float) -> int:
        """How many of so many workers on the cluster must go now."""
        if now < self._next_at:
            return 0
        excess = max(0, num_placed - self._room)
        if excess:
            self._next_at = now + AGAIN_S
        return excess

    def end(self) -> None:
        """All slots are given back."""
        if self._holders is not None:
            self._holders.hold(0)
        self._next_at = inf


def need_of(config: Mapping[str, Any], device: str) -> Need:
    """What a worker of a run takes, by its config.json. WrongInput for a damaged one."""
    keys = ("cpus_per_worker", "labels", "accelerator_type", "worker_resources")
    try:
        given = Resources(**{key: config[key] for key in keys if key in config})
    except (TypeError, ValueError) as error:
        raise WrongInput(f"config.json is damaged: {error}") from error
    return given.need("cuda" if device.startswith("cuda") else "cpu")
