"""The group over gloo, whose operations run in threads of gloo's own and raise in them."""

import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  (no __all__)

from elastic.protocol.errors import CollectiveRefused, PeerLost
from workers.distributed.group_spec import GroupSpec
from workers.distributed.pending import Pending, Waitable, failure_of
from workers.distributed.process_group import Group
from workers.torch_private.c10d import gloo_options

DIRECT_WAIT = timedelta(milliseconds=10)
"""So long a wait is the backend's own, which costs no change of threads in Python. Nothing ends it
but the collective: an abandonment may be noticed so much later."""

_without_future: set[str] = set()
"""Operations between two ranks for which gloo has none; asking it takes as long as a small send."""


class GlooGroup(Group):
    """A wait ends when gloo says so, or at once when the group is abandoned."""

    backend_name = "gloo"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._posted: list[Waitable] = []

    def finish(self, pending: Pending) -> None:
        if not pending.work.is_completed():
            self.on_wait(*pending.what)
            if not self.is_abandoned:
                self._await(pending)
        self.check()
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise failure_of(error) from error

    def _await(self, pending: Pending) -> None:
        """Until it is done or the group is abandoned."""
        with suppress(RuntimeError):  # it took longer, or failed, which is looked at again
            pending.work.wait(DIRECT_WAIT)
        if not pending.work.is_completed():
            pending.work.get_future().add_done_callback(pending.on_done)
            with self.changed:
                self.changed.wait_for(lambda: pending.is_done or self.is_abandoned)

    def refusal_of(self, error: RuntimeError) -> PeerLost:
        """It connects and sends in threads of its own: what a launch raises is of the call."""
        return CollectiveRefused(str(error))

    def post(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.check()
        try:
            self._posted.append(self.backend.send([tensor], peer, tag))
        except RuntimeError as error:
            raise failure_of(error) from error

    def posted(self) -> dist.Work:
        """One thread waits for all of them: to wake one for each takes longer than a small send."""
        works, self._posted = self._posted, []
        if not works:
            return super().posted()
        return self._work(self._in_flight(_Awaited(*works), (0, "send", 0, "peers")))

    @property
    def is_settled(self) -> bool:
        if self._posted:
            self.posted()
        return super().is_settled

    def _waitable(self, work: Any, name: str = "") -> Waitable:
        if name not in _without_future:
            try:
                work.get_future()
            except RuntimeError:
                if name:
                    _without_future.add(name)
            else:
                return work
        return _Awaited(work)


class _Awaited:
    """Sends, a receive or a reduce-scatter: gloo has no future for it, so that a thread waits."""

    def __init__(self, *works: Waitable) -> None:
        self._works = works
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        _waiters.take(self._await)

    def _await(self) -> None:
        try:
            for work in self._works:
                work.wait()  # without the GIL; a second one would wait for ever
        except RuntimeError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def wait(self, timeout: timedelta | None = None, /) -> None:
        """timeout: makes a look of it; its thread waits on."""
        if timeout is None or self.future.done():
            self.future.wait()

    def is_completed(self) -> bool:
        return self.future.done()


class _Waiters:
    """As many threads as wait at a time; who has waited waits for the next one."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_idle = 0
        self._lock = threading.Lock()

    def take(self, task: Callable[[], None]) -> None:
        with self._lock:
            is_one_idle = self._num_idle > 0
            self._num_idle -= is_one_idle
        self._tasks.put(task)
        if not is_one_idle:
            threading.Thread(target=self._run, name="gloo-wait", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                self._num_idle += 1


_waiters = _Waiters()


@cache
def keep_groups_in_forks() -> None:
    """The end of a group joins its threads, of which a forked process (a loader's, torch's
    DataLoader's) has none: where it collected a group of its parent, it would hang or crash."""
    os.register_at_fork(after_in_child=gc.freeze)


def connect(host: str, spec: GroupSpec) -> GlooGroup:
    """The group of this name, once all its members are here. host: this worker's address."""
    keep_groups_in_forks()
    options = gloo_options(host, spec.operation_timeout_s)
    store, rank, world_size = PrefixStore(spec.name, spec.store), spec.rank, spec.world_size
    found = cast(Any, dist.ProcessGroupGloo)(store, rank, world_size, options)
    return GlooGroup(found, rank, world_size, spec.name, spec.store)
