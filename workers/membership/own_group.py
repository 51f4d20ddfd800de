"""A member's process group, formed or about to be, and the way out of it from any thread.

What a group is, is workers/distributed/process_group.py's; when it is left, machine.py's.
"""

from collections.abc import Callable

import torch

from elastic.protocol.messages.to_worker import Form
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed import process_group
from workers.distributed.backends import connect_for
from workers.distributed.process_group import Alone, Group
from workers.health.vitals import Vitals


class OwnGroup:
    """Of one generation at a time."""

    def __init__(
        self,
        spec: WorkerSpec,
        vitals: Vitals,
        device: torch.device,
        is_given_up: Callable[[], bool],
        on_stuck: Callable[[str], None],
    ) -> None:
        """is_given_up: whether the generation at hand is, by now. on_stuck: see Group."""
        self._spec, self._vitals, self._device = spec, vitals, device
        self._is_given_up, self._on_stuck = is_given_up, on_stuck
        self._generation = 0
        self._formation: process_group.Formation | None = None
        self.group: Group | None = None

    def leave(self, generation: int) -> None:
        """For the next one."""
        if self.group is not None:
            process_group.leave(self.group)
        self.group = self._formation = None
        self._generation = generation

    def begin(self, form: Form) -> None:
        """To form, in a thread, unless it is the group of one."""
        if form.world_size > 1:
            connect = connect_for(self._device, self._spec.host)
            self._formation = process_group.form_for(self._spec, form, connect)
            if self._is_given_up():  # `abandon` may have looked before it was there
                self._formation.abandon()

    def meet(self) -> None:
        """Wait until it has formed. Raises PeerLost."""
        if self._formation is None:
            group: Group = Alone(process_group.name_of(self._spec, self._generation))
        else:
            group = self._formation.wait(self._spec.join_timeout_s)
        group.on_wait, group.on_stuck = self._vitals.waits_in, self._on_stuck
        self.group, self._formation = group, None

    def abandon(self, generation: int) -> None:
        """Whoever waits in it is free, if it is of this generation or an earlier one."""
        if self._generation > generation:
            return
        for held in (self._formation, self.group):
            if held is not None:
                held.abandon()
