"""A worker's copies in other processes' memory, as its member sees them; `NoBackup` for a state
that every member holds.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.layout import BlockSets
from workers.backup.copy import BackupCopy
from workers.train_state.owner import StateOwner
from workers.train_state.train_state import TrainState


class Backup(Protocol):
    """Shipped are BackupClient and NoBackup."""

    holders: tuple[BackupAddress, ...]
    """The best first."""
    own_copies: list[BackupCopy]
    """Oldest first: the last one may not be held yet, by it or by others."""

    @property
    def delays_commits(self) -> bool:
        """A step is on record only once all its copies are held."""
        ...

    def begin(
        self,
        train_state: TrainState,
        origin: int,
        by: StateOwner,
        *,
        is_held: bool = False,
        doubled: BlockSets = (),
    ) -> None:
        """A generation has formed: all its parts are to be held, and older ones kept until then.

        origin: the generation that computed the step it begins with. is_held: holders have all of
        that state, cut as it was before, which will do until the first step's copies are held.
        doubled: tensors of these blocks live on two nodes, and need no holder.
        """
        ...

    def after_step(self, train_state: TrainState, by: StateOwner) -> None:
        """A step was voted for; `wait` has been called before, so all hold the last copy."""
        ...

    def before_pause(self, train_state: TrainState, by: StateOwner) -> None:
        """Whoever leaves at this boundary takes nothing along: all of it is to be held."""
        ...

    def finished(self) -> list[BackupCopy]:
        """Those that are whole on the host, the newest first."""
        ...

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until the last copy is held, there is nobody to hold it, or is_over()."""
        ...

    def forget(self) -> None:
        """The run goes back to a checkpoint: what was kept is of no use."""
        ...

    def hear(self, holders: Sequence[tuple[str, str, int]]) -> None:
        """In the link's thread: where this rank's copies may go, the best first."""
        ...


class NoBackup:
    """Any survivor is a source."""

    delays_commits = False

    def __init__(self) -> None:
        self.holders: tuple[BackupAddress, ...] = ()
        self.own_copies: list[BackupCopy] = []

    def begin(
        self,
        train_state: TrainState,
        origin: int,
        by: StateOwner,
        *,
        is_held: bool = False,
        doubled: BlockSets = (),
    ) -> None:
        pass

    def after_step(self, train_state: TrainState, by: StateOwner) -> None:
        pass

    def before_pause(self, train_state: TrainState, by: StateOwner) -> None:
        pass

    def finished(self) -> list[BackupCopy]:
        return []

    def wait(self, is_over: Callable[[], bool]) -> None:
        pass

    def forget(self) -> None:
        pass

    def hear(self, holders: Sequence[tuple[str, str, int]]) -> None:
        pass
