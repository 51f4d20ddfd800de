"""What FSDP2 sends, over the group of the generation: all-gathers of parameters, gradient slices.

Every wait can be given up: a lost peer ends in `on_lost`, which must raise. What becomes of the
slices is the strategy's business (fsdp.py), where FSDP2 calls in is fsdp2_private/hooks.py's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol
from zlib import crc32

import torch
from torch import Tensor

from elastic.protocol.errors import PeerLost
from workers.distributed.pending import Aside
from workers.reduction.tree import Group, Pending


class DecidingGroup(Group, Protocol):
    """One with a group to decide over (workers/distributed/process_group.py)."""

    waiting_for: Aside

    @property
    def control(self) -> "DecidingGroup": ...


class Collectives:
    """One generation's group as FSDP2's hooks use it, in the middle of the user's forward."""

    def __init__(
        self,
        group: DecidingGroup,
        on_lost: Callable[[PeerLost], NoReturn],
        gathering: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """gathering: entered while this rank waits for its peers (workers/health/vitals.py)."""
        self._group, self._on_lost, self._gathering = group, on_lost, gathering
        self.rank, self.world_size = group.rank(), group.size()
        self.sent_bytes = 0
        """What this rank has sent to others."""
        self._order = 0
        """A checksum of what was exchanged in this step, in its order."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self._note(f"gather {output.numel()}")
        self.sent_bytes += tensor.nbytes * (self.world_size - 1)
        self._wait(lambda: self._group.all_gather_flat(output, tensor))

    def all_to_all(self, tensor: Tensor, name: str) -> Tensor:
        """The stretches that the ranks have for this one, in rank order. name: of what they are."""
        self._note(name)
        self.sent_bytes += tensor.nbytes // self.world_size * (self.world_size - 1)
        received = torch.empty_like(tensor)
        self._wait(lambda: self._group.all_to_all_flat(received, tensor))
        return received

    def stream_waits(self) -> AbstractContextManager[None]:
        """Within: a stream waits for what has been sent, and the host does not."""
        return self._group.waiting_for("stream")

    def _note(self, name: str) -> None:
        self._order = crc32(name.encode(), self._order)

    def check_order(self) -> None:
        """At the end of a step's passes. A collective.

        ValueError if ranks have exchanged the gradients of different blocks with each other: a
        block's backward was not reached on some rank, and equal sizes have hidden it.
        """
        order, self._order = self._order, 0
        mine = torch.tensor([order], dtype=torch.int64)
        orders = mine.new_empty(self.world_size)
        self._wait(lambda: self._group.control.all_gather_flat(orders, mine))
        if (orders != order).any():
            raise ValueError(
                "the ranks' backwards have gone different ways: every micro-batch's forward and "
                "backward must reach the same blocks in the same order (a detached block, a "
                "condition on the data); use parallel='fsdp-grad-op' or 'ddp' for such a model"
            )

    def _wait(self, launch: Callable[[], Pending]) -> None:
        try:
            pending = launch()  # not yet a wait: who hangs in here is late, and nobody else is
            with self._gathering():
                pending.wait()
        except PeerLost as error:
            self._on_lost(error)
