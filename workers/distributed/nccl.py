"""The group over NCCL, whose waits order a stream and return: the host learns of a failure at its
next synchronisation, and an aborted operation leaves garbage and no error.

NCCL is ours to end: torch starts no threads beside it (elastic/protocol/nccl_settings.py).
"""

import logging
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (no __all__)

from elastic.protocol.errors import CollectiveRefused, NoAnswer, OutOfDeviceMemory, PeerLost
from workers.distributed.group_spec import GroupSpec
from workers.distributed.pending import Pending, Waitable, What, failure_of
from workers.distributed.process_group import Group
from workers.torch_private.c10d import nccl_options

log = logging.getLogger(__name__)
REFUSALS = ("ncclInvalidArgument", "ncclInvalidUsage")
"""NCCL's words for a wrong call: the same members would meet it again."""
WITHOUT_MEMORY = re.compile(r"^(Cuda failure .*out of memory|Failed to CUDA [cm]alloc).*", re.M)
"""Its last words after ncclUnhandledCudaError, where an allocation was the call that failed."""
UNANSWERED = re.compile(
    r"^NET/IB ?: Got (?:async )?completion from peer (\S+)<\d+> with (?:status=|error )12\b", re.M
)
"""Its last words after ncclRemoteError, where the network card has sent in vain
(IBV_WC_RETRY_EXC_ERR). A peer that is gone, or has aborted, leads to others."""
LOOK_S = 0.002
"""Between two looks at whether a group that forms has been given up."""
FREE_BYTES = 1 << 30
"""Outside torch's cache, for NCCL's buffers."""
STAGGER_S = 2.0
"""Between the ranks whose aborts all hang: the first one's end may free the others."""


class NcclGroup(Group):
    """What the host reads of a result counts only if `is_abandoned` is still false afterwards."""

    backend_name = "nccl"
    has_tags = False
    abort_s = 30.0
    """An abort waits for the kernels that are queued; a rank whose abort takes longer is lost."""
    _aborting: threading.Thread | None = None

    def finish(self, pending: Pending) -> None:
        self.check()
        try:
            with self.waiting_for("stream"):
                cast(Any, pending.work).block_current_stream()  # `wait` would block the host
        except RuntimeError as error:
            raise self.failure_of(error) from error
        self.check()

    def failure_of(self, error: RuntimeError) -> PeerLost:
        return kind_of(failure_of(error))

    def _in_flight(
        self, work: Waitable, what: What, unpack: Callable[[], None] | None = None
    ) -> Pending:
        pending = super()._in_flight(work, what, unpack)
        pending.begins = torch.accelerator.current_stream().record_event()
        return pending

    def device_waits_in(self) -> What | None:
        self.check()
        self._end_settled()
        parts = [p for p in self._parts if isinstance(p, NcclGroup)]
        found = [part.device_waits_in() for part in parts]  # each may be the first to notice a loss
        if self._pending:
            oldest = self._pending[0]
            has_begun = oldest.begins is not None and oldest.begins.query()
            return oldest.what if has_begun else None
        return next(filter(None, found), None)

    def _end_settled(self) -> None:
        """Raises PeerLost if NCCL has given one up: that may be the first notice of a lost peer."""
        while self._pending and self._pending[0].is_settled:
            try:
                self._pending[0].work.wait()  # it does not block what is over
            except RuntimeError as error:
                raise self.failure_of(error) from error
            self._pending.popleft()

    def abandon(self) -> None:
        """The abort waits for the device. It has a thread of its own, as have those of the parts:
        each may wait for kernels of another, and whoever abandons has commands to read."""
        super().abandon()
        with self.changed:
            if self._aborting is not None:
                return
            self._aborting = threading.Thread(target=self._abort, name="nccl-abort", daemon=True)
            self._aborting.start()
        threading.Thread(target=self._watch, name="nccl-abort-watch", daemon=True).start()

    def _abort(self) -> None:
        abort(self.backend, self.name_of_group)

    def _watch(self) -> None:
        assert self._aborting is not None
        limit_s = self.abort_s + STAGGER_S * self.rank()
        self._aborting.join(limit_s)
        if self._aborting.is_alive():
            self.on_stuck(f"NCCL's abort of group {self.name_of_group} hangs for {limit_s:g} s")

    @property
    def is_settled(self) -> bool:
        is_aborting = self._aborting is not None and self._aborting.is_alive()
        return not is_aborting and super().is_settled


def connect(device: torch.device, spec: GroupSpec) -> NcclGroup:
    """The group, once all its members are here. Raises PeerLost if it is given up before."""
    torch.cuda.set_device(device)
    if torch.cuda.mem_get_info(device)[0] < FREE_BYTES:
        torch.cuda.empty_cache()  # NCCL's own memory is none of torch's
    options = nccl_options(spec.operation_timeout_s)
    options.config.blocking = 0  # an absent member would be waited for, for ever
    store = PrefixStore(spec.name, spec.store)
    backend = dist.ProcessGroupNCCL(store, spec.rank, spec.world_size, options)
    backend.eager_connect_single_device(device)
    return formed(backend, device, spec)


def formed(backend: Any, device: torch.device, spec: GroupSpec) -> NcclGroup:
    """The group over a backend that has begun to connect. Raises PeerLost."""
    connecting = _Connecting(backend, device, spec.given_up)
    while not connecting.is_over.wait(LOOK_S) and not spec.given_up.is_set():
        pass
    if spec.given_up.is_set():
        raise PeerLost("the generation was given up while it formed")
    if connecting.error is not None:
        raise kind_of(failure_of(connecting.error)) from connecting.error
    group = NcclGroup(backend, spec.rank, spec.world_size, spec.name, spec.store)
    group.abort_s = spec.join_timeout_s
    return group


def kind_of(lost: PeerLost) -> PeerLost:
    """What NCCL says of it. Whatever else it says, the same members try again: how well it tells
    apart what a lost peer, its abort or its own memory has led to differs by its version."""
    text = str(lost)
    if any(words in text for words in REFUSALS):
        return CollectiveRefused(text)
    if found := WITHOUT_MEMORY.search(text):
        return OutOfDeviceMemory(f"NCCL got no memory of the GPU: {found[0]}")
    if found := UNANSWERED.search(text):
        return NoAnswer(text, found[1])
    return lost


class _Connecting:
    """Until NCCL has connected. Only a launch waits for that in torch, which holds the communicator
    meanwhile: an abort would wait as long. So it is this thread's, too."""

    def __init__(self, backend: Any, device: torch.device, given_up: threading.Event) -> None:
        self.is_over = threading.Event()
        self.error: RuntimeError | None = None
        self._backend, self._device, self._given_up = backend, device, given_up
        threading.Thread(target=self._run, name="nccl-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._backend.allreduce([torch.zeros(1, device=self._device)]).block_current_stream()
        except RuntimeError as error:  # of NCCL: also that it took longer than it may
            self.error = error
        if self.error is not None or self._given_up.is_set():
            abort(self._backend, "that was to form")
        self.is_over.set()


def abort(backend: Any, name: str) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning('group="%s" could not be aborted: %s', name, error)
