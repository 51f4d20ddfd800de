"""What is in flight: a collective as our code waits for it, and as torch's code does.

Who waits, and how a wait is given up, is the group's business (process_group.py).
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Work

from elastic.protocol.errors import OutOfDeviceMemory, PeerLost, UnfitNode
from workers.distributed.device_errors import is_gone

_UNLIMITED = timedelta(0)


OnWait = Callable[[int, str, int, str], None]
Aside = Callable[[str], AbstractContextManager[None]]
What = tuple[int, str, int, str]
"""The operation that a rank waits in: its number, its name, its elements (0 where ranks may differ)
and, of an exchange between two, the peer."""


class Waitable(Protocol):
    """What a backend returns for an operation."""

    def wait(self, timeout: timedelta = ..., /) -> Any: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Any: ...


class Waiting(Protocol):
    """What an operation asks of its group."""

    changed: threading.Condition

    def finish(self, pending: "Pending") -> None: ...


class Waits(Protocol):
    """Who is told what the main thread waits for: see `on_wait` and `waiting_for` of Group."""

    def waits_in(self, number: int, collective: str, size: int, part: str = "", /) -> None: ...
    def waiting_for(self, phase: str, /) -> AbstractContextManager[None]: ...


class Abandonable(Protocol):
    """What is given up with the group that it is a part of, formed or not."""

    def abandon(self) -> None: ...


class Pending:
    """An operation in flight. `wait()` raises PeerLost if it fails or its group is abandoned."""

    def __init__(
        self, group: Waiting, work: Waitable, unpack: Callable[[], None] | None, what: What
    ) -> None:
        self._group, self._unpack = group, unpack
        self.work, self.what, self.is_done = work, what, False
        self.begins: torch.Event | None = None
        """Once the device has come to it, it waits for peers."""

    def on_done(self, _: object) -> None:
        """The backend tells, in a thread of its own, if it was asked to."""
        with self._group.changed:
            self.is_done = True
            self._group.changed.notify_all()

    def wait(self) -> None:
        self._group.finish(self)
        if self._unpack is not None:
            self._unpack()

    @property
    def is_settled(self) -> bool:
        return self.work.is_completed()


class Settling(Protocol):
    """An operation in flight, or one that a lone rank has done."""

    def wait(self) -> None: ...
    @property
    def is_settled(self) -> bool: ...


class TorchWork(Work):
    """Operations in flight as torch's own code waits for them."""

    def __init__(self, *pending: Settling) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """timeout: is the group's, whatever is asked for. Raises PeerLost."""
        for pending in self._pending:
            pending.wait()
        return True

    def is_completed(self) -> bool:
        return all(pending.is_settled for pending in self._pending)

    def synchronize(self) -> None:
        self.wait()

    def drop(self) -> None:
        """Nobody waits any more; torch may keep what was never waited for."""
        self._pending = (Abandoned(),)


class Abandoned:
    """An operation of a group that was left."""

    is_settled = True

    def wait(self) -> None:
        raise PeerLost("the generation was given up")


def failure_of(error: RuntimeError) -> PeerLost:
    """What a backend raises while it waits is of the connections, whatever it says. Raises an error
    of this device as it is."""
    if isinstance(error, torch.AcceleratorError):
        raise error
    return PeerLost(str(error))


def forming_failure_of(error: Exception) -> Exception:
    """What is told of what forming has raised: a lost peer, or of this worker itself."""
    if isinstance(error, UnfitNode | OutOfDeviceMemory) or is_gone(error):
        return error
    lost = PeerLost(f"forming failed: {error}")
    lost.__cause__ = error
    return lost
