"""A member's own group, of one generation at a time, and what is left of those before.

How a group forms, and what it does, is process_group.py's.
"""

import threading
from collections.abc import Callable

from elastic.protocol.messages.to_worker import Form
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.group_spec import name_of
from workers.distributed.pending import Waits
from workers.distributed.process_group import Alone, Connect, Formation, Group, form

_left_behind: list[Group | Formation] = []
_lock = threading.Lock()


def leave(group: Group | Formation) -> None:
    """Give it up, and free every left group in which nothing is under way by now."""
    group.abandon()
    group.forget()
    with _lock:
        _left_behind.append(group)
        settled = [left for left in _left_behind if left.is_settled]
        _left_behind[:] = [left for left in _left_behind if left not in settled]
    for left in settled:
        left.free()


class OwnGroup:
    """A member's group, formed or about to be, of one generation at a time, and the way out of it
    from any thread. When it is left is workers/membership/machine.py's."""

    def __init__(
        self,
        spec: WorkerSpec,
        connect: Connect,
        is_given_up: Callable[[], bool],
        waits: Waits,
        on_stuck: Callable[[str], None],
    ) -> None:
        """is_given_up: whether the generation at hand is, by now. on_stuck: see Group."""
        self._spec, self._connect, self._is_given_up = spec, connect, is_given_up
        self._waits, self._on_stuck = waits, on_stuck
        self._generation = 0
        self._formation: Formation | None = None
        self.group: Group | None = None

    def leave(self, generation: int) -> None:
        """For the next one."""
        for held in (self._formation, self.group):
            if held is not None:
                leave(held)
        self.group = self._formation = None
        self._generation = generation

    def begin(self, asked: Form) -> None:
        """To form, in a thread, unless it is the group of one."""
        if asked.world_size > 1:
            assert asked.store is not None
            self._formation = form(
                store_address=asked.store,
                prefix=name_of(self._spec, asked.generation),
                rank=asked.rank,
                world_size=asked.world_size,
                connect=self._connect,
                join_timeout_s=self._spec.timeouts.join_s,
                operation_timeout_s=self._spec.timeouts.operation_s,
            )
            if self._is_given_up():  # `abandon` may have looked before it was there
                self._formation.abandon()

    def meet(self) -> None:
        """Wait until it has formed. Raises PeerLost."""
        if self._formation is None:
            group: Group = Alone(name_of(self._spec, self._generation))
        else:
            group = self._formation.wait(self._spec.timeouts.join_s)
        group.on_wait, group.on_stuck = self._waits.waits_in, self._on_stuck
        group.waiting_for = self._waits.waiting_for
        self.group, self._formation = group, None

    def abandon(self, generation: int) -> None:
        """Whoever waits in it is free, if it is of this generation or an earlier one."""
        if self._generation > generation:
            return
        for held in (self._formation, self.group):
            if held is not None:
                held.abandon()
