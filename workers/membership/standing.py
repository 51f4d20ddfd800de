"""Where a member stands, for a controller that it has not met before.

The kinds are those of elastic/control/state.py `Standing`. Kept by the member's thread, told by
the link's thread: a member in the middle of a long step or evaluation answers at once.
"""

from elastic.protocol.messages.to_worker import Finish, Form, OfGeneration, Recall


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

    def hear(self, command: OfGeneration) -> None:
        """It has come; the link's thread says so."""
        if isinstance(command, Form | Recall | Finish):
            self.told = (command.generation, command.rank, command.world_size)
            self._is_finishing = isinstance(command, Finish)

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
