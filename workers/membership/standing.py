"""Where a member stands, for a controller that it has not met before.

The kinds are those of elastic/control/state.py `Standing`. Kept by the member's thread, told by
the link's thread: a member in the middle of a long step or evaluation answers at once.
"""

from typing import Any


class Standing:
    """What the member has, and what it was told, obeyed or not."""

    def __init__(self) -> None:
        self.has_state = False
        self.is_following: bool | None = None
        """None: nobody; False: the copy is under way; True: it is at most a step behind."""
        self.is_waiting = False
        """At a boundary, for a generation to form."""
        self.formed = 0
        """The newest generation that has formed here."""
        self.told = (0, 0, 0)
        """generation, rank, world size"""
        self._is_finishing = False

    def hear(self, header: dict[str, Any]) -> None:
        """A command for a generation has come; the link's thread says so."""
        if header["type"] in ("form", "recall", "finish"):
            self.told = (header["generation"], header["rank"], header["world_size"])
            self._is_finishing = header["type"] == "finish"

    def kind(self, *, is_cancelled: bool) -> str:
        is_forming = self.told[0] > self.formed
        if self._is_finishing:
            return "ended"
        if self.is_following is not None and not is_forming:
            return "synced" if self.is_following else "syncing"
        if not self.has_state:
            return "ready"
        is_at_work = not is_forming and not self.is_waiting and not is_cancelled
        return "working" if is_at_work else "stopped"

    def to_json(self, *, step: int, is_cancelled: bool) -> dict[str, Any]:
        generation, rank, world_size = self.told
        return {
            "kind": self.kind(is_cancelled=is_cancelled),
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "step": step,
        }
