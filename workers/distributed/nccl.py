"""The group over NCCL, whose waits order a stream and return: the host learns of a failure at its
next synchronisation, and an aborted operation leaves garbage and no error.
"""

import logging
import threading
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (no __all__)

from elastic.protocol.errors import PeerLost
from workers.distributed.pending import Pending, failure_of
from workers.distributed.process_group import Group
from workers.distributed.store import StoreClient

log = logging.getLogger(__name__)


class NcclGroup(Group):
    """What the host reads of a result counts only if `is_abandoned` is still false afterwards."""

    backend_name = "nccl"
    _aborting: threading.Thread | None = None

    def finish(self, pending: Pending) -> None:
        self._check()
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise failure_of(error) from error
        self._check()

    def _check(self) -> None:
        if self.is_abandoned:
            raise PeerLost("the generation was given up")

    def abandon(self) -> None:
        """The abort waits for the device. It has a thread of its own, as have those of the parts:
        each may wait for kernels of another, and whoever abandons has commands to read."""
        super().abandon()
        with self.changed:
            if self._aborting is not None:
                return
            self._aborting = threading.Thread(target=self._abort, name="nccl-abort", daemon=True)
            self._aborting.start()

    def _abort(self) -> None:
        try:
            self.backend.abort()
        except RuntimeError as error:
            log.warning('group="%s" could not be aborted: %s', self.name_of_group, error)

    @property
    def is_settled(self) -> bool:
        is_aborting = self._aborting is not None and self._aborting.is_alive()
        return not is_aborting and super().is_settled


def connect(
    device: torch.device,
    store: StoreClient,
    name: str,
    rank: int,
    world_size: int,
    operation_timeout_s: float,
) -> NcclGroup:
    """The group of this name, once all its members are here."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=operation_timeout_s)
    found = dist.ProcessGroupNCCL(PrefixStore(name, store), rank, world_size, options)
    found.eager_connect_single_device(device)
    return NcclGroup(cast(Any, found), rank, world_size, name, store)
