"""A generation's process group, as far as a simulation needs it: who is there, and who waits."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Member(Protocol):
    number: int
    is_alive: bool


@dataclass(eq=False)
class Group:
    members: list[Any]
    left: set[int] = field(default_factory=set)
    """Workers that have abandoned it."""
    arrived: dict[Any, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Collective -> what each worker has brought."""
    saved: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Step -> ranks whose part is durable."""
    found: Any = None
    """What the members have found out together."""
    found_known: Any = None
    """What the first of them could report then."""

    def has_gap(self) -> bool:
        """A collective of it may fail."""
        return bool(self.left) or not all(w.is_alive for w in self.members)

    def arrive(self, what: Any, worker: int, brought: Any = None) -> None:
        self.arrived[what][worker] = brought

    def is_complete(self, what: Any) -> bool:
        return len(self.arrived[what]) == len(self.members)

    def once(self, find: Callable[[], Any]) -> Any:
        """What find() gives to the first who asks, for all."""
        if self.found is None:
            self.found = (find(),)
        return self.found[0]
