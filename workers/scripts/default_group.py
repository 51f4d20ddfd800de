"""torch's default process group in a script run: the group of the generation, as a script sees it.

A script's collectives, DistributedDataParallel and DistributedSampler use the default group. A lost
peer raises PeerLost in them, out of a backward as well; `failure` says afterwards what it was.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from elastic.protocol.errors import PeerLost
from workers.distributed import registry
from workers.distributed.c10d import ALL_GATHER, ALL_REDUCE, BARRIER, BROADCAST, C10dGroup
from workers.distributed.pending import Abandoned, Pending, Settling, TorchWork
from workers.distributed.process_group import Group
from workers.scripts.in_place.call_state import COLLECTIVE, SEND, SUM
from workers.scripts.in_place.collective import OwnCollective
from workers.scripts.in_place.rule import OWN_GROUPS, SENDS
from workers.scripts.ranks import is_asked_by_script
from workers.torch_private.autograd import at_end_of_backward, is_in_backward

FORMED_S = 60.0
"""All ranks of a group of the script's own have asked for it by then."""
NAME = "elastic"
"""Not the backend's: torch's DDP would ask a group of that name for gloo's own object."""


class Collectives(Protocol):
    """What goes on after a loss is told of the script's own collectives (in_place/course.py)."""

    members: tuple[int, ...]

    @property
    def sums_survivors(self) -> bool: ...
    def hear_rank_asked(self) -> None: ...
    def begin_collective(self, own: OwnCollective, *, is_by_rank: bool) -> None: ...
    def drop_collective(self) -> None: ...
    def end_collective(self, own: OwnCollective) -> None: ...
    def mend_collective(self, error: PeerLost, own: OwnCollective) -> bool: ...
    def barrier(self) -> None: ...
    def refuse(self, why: str) -> None: ...


class DefaultGroup(C10dGroup):
    """Over a generation's group, or over one after the other: torch's names, with futures, as DDP
    waits for them."""

    def __init__(
        self,
        inner: Group,
        *,
        waiting: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        """waiting: within, the script waits for its peers, and in what. on_refusal: a
        collective is refused, as a peer is lost."""
        super().__init__(inner.rank(), inner.size())
        self.inner, self.waiting, self._on_refusal = inner, waiting, on_refusal
        self.launched = ""
        """The name of the newest collective."""
        self.failure: PeerLost | None = None
        """What a collective of this group met first; None: nothing."""
        self._futures: WeakSet[_Future] = WeakSet()
        self._of_backward: list[TorchWork] = []
        """What the backward at hand has launched."""
        self._own: list[_OwnGroup] = []
        """Of some of the ranks, as the script has asked for them."""
        self.course: Collectives | None = None
        """None: a loss ends what uses the group."""
        self._coming: OwnCollective | None = None
        """What is about to be launched, if it can be mended."""
        inner.adopt(self)

    def replace(self, inner: Group) -> None:
        """The members that are left are the group from now on."""
        self.inner, self.failure = inner, None
        self._of_backward = []
        inner.adopt(self)

    @property
    def backend(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None once the group was left: a launch is refused."""
        return self.inner.backend

    def rank(self) -> int:
        if self.course is not None and is_asked_by_script(sys._getframe(1)):
            self.course.hear_rank_asked()
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def getGroupName(self) -> str:
        return self.inner.getGroupName()

    getGroupDesc = getGroupName

    def getBackendName(self) -> str:
        return NAME

    def new_group(self, ranks: list[int], *, group_name: str, **_: Any) -> "DefaultGroup | None":
        """What `torch.distributed.new_group` makes of some of the ranks; None: this is none of
        them. Raises PeerLost."""
        if self.course is not None:
            self.course.refuse(OWN_GROUPS.why)
        if self.rank() not in ranks:
            return None
        spelled = "-".join(map(str, ranks))
        number = sum(own.spelled == spelled for own in self._own)  # torch's differ between ranks
        try:
            inner = self.inner.part(f"own{spelled}/{number}", ranks, FORMED_S)
        except PeerLost as error:
            self.hear_failure(error)
            raise
        own = _OwnGroup(inner, self, spelled)
        own.getGroupName = lambda: group_name  # type: ignore[method-assign]
        self._own.append(own)
        return own

    def shutdown(self) -> None:
        """Torch's: it ends with its generation."""

    def leave(self) -> None:
        """The call is over: torch finds neither it nor those of some of its ranks any more."""
        for group in (*self._own, self):
            registry.unregister(group)
            group._drop()

    def abandon(self) -> None:
        """Any thread: nothing that is in flight will come."""
        for future in list(self._futures):
            future.give_up(PeerLost("the generation was given up"))

    def wait(self, timeout_s: float) -> Group:
        return self.inner

    def allreduce(self, tensors: list[Tensor], opts: Any = ALL_REDUCE) -> TorchWork:
        doing = SUM if self.course and self.course.sums_survivors else COLLECTIVE
        with self._announced(doing, tensors, tensors):
            work = super().allreduce(tensors, opts)
        assert isinstance(work, FutureWork)
        work.result = tensors
        if is_in_backward() and tensors[0].device.type == "cpu":
            self._wait_at_end_of_backward(work)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any = BROADCAST) -> TorchWork:
        source = self.course.members[opts.rootRank] if self.course else -1
        with self._announced(SEND, tensors, tensors, source):
            return super().broadcast(tensors, opts)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = ALL_GATHER
    ) -> TorchWork:
        with self._announced(COLLECTIVE, [t for of in outputs for t in of]):
            return super().allgather(outputs, tensors, opts)

    @contextmanager
    def _announced(self, doing: str, *of_own: Any) -> Iterator[None]:
        """Within, what is launched can be mended after a loss. of_own: OwnCollective's."""
        if self.course is not None:
            self._coming = OwnCollective(doing, *of_own)
        try:
            yield
        finally:
            self._coming = None  # it may have raised before it was launched

    def _wait_at_end_of_backward(self, work: TorchWork) -> None:
        """DDP's own callback there, queued later, would wait in C++, where no error of Python's
        ends it."""
        if not self._of_backward:
            at_end_of_backward(self._end_backward)
        self._of_backward.append(work)

    def _end_backward(self) -> None:
        works, self._of_backward = self._of_backward, []
        for work in works:
            work.wait()

    def barrier(self, opts: Any = BARRIER) -> TorchWork:
        if self.course is None:
            return super().barrier(opts)
        self.course.barrier()
        return TorchWork()

    def hear_failure(self, error: PeerLost) -> None:
        """Of one of its collectives."""
        self.failure = self.failure or error

    def future_of(self, pending: Settling, result: list[Tensor]) -> "_Future":
        future = _Future(result, self.hear_failure)
        self._futures.add(future)
        if isinstance(pending, Mending):
            pending = pending.pending or Abandoned()
        if isinstance(pending, Abandoned):
            future.give_up(PeerLost("the generation was given up"))
        elif isinstance(pending, Pending):
            pending.work.get_future().add_done_callback(future.end)
        else:  # of a lone rank: it is done
            future.set_result(result)
        if self.inner.is_abandoned:  # `abandon` may have looked before it was there
            future.give_up(PeerLost("the generation was given up"))
        return future

    def _launch(self, what: tuple[str, int], launch: Callable[[], Any]) -> Settling:
        self.launched = what[0]
        if self.course is None:
            return self._told(lambda: self.inner._launch(what, launch))
        own = self._coming or OwnCollective(COLLECTIVE)
        self.course.begin_collective(own, is_by_rank=what[0] not in ("all_reduce", "broadcast"))
        try:
            return Mending(self, self.course, own, lambda: self.inner._launch(what, launch))
        except Exception:
            self.course.drop_collective()
            raise

    def _exchange(self, what: tuple[str, int, int], launch: Callable[[], Any]) -> Settling:
        self.launched = what[0]
        if self.course is not None:
            self.course.refuse(SENDS.why)
        return self._told(lambda: self.inner._exchange(what, launch))

    def _waitable(self, work: Any, name: str = "") -> Any:
        return self.inner._waitable(work, name)

    def _told(self, launch: Callable[[], Settling]) -> Settling:
        try:
            return launch()
        except PeerLost as error:
            self.hear_failure(error)
            self._on_refusal()
            raise

    def _work(self, *pending: Settling) -> TorchWork:
        work = FutureWork(self, *pending)
        self._works.add(work)
        return work


class _OwnGroup(DefaultGroup):
    """Of some of the ranks."""

    def __init__(self, inner: Group, whole: DefaultGroup, spelled: str) -> None:
        super().__init__(inner, waiting=whole.waiting, on_refusal=whole._on_refusal)
        self._whole, self.spelled = whole, spelled

    def hear_failure(self, error: PeerLost) -> None:
        super().hear_failure(error)
        self._whole.hear_failure(error)


class Mending:
    """A collective of the script's own in a call that goes on after losses."""

    def __init__(
        self,
        group: DefaultGroup,
        course: Collectives,
        own: OwnCollective,
        launch: Callable[[], Settling],
    ) -> None:
        self._group, self._course, self._own, self._launch = group, course, own, launch
        self.pending: Settling | None = None
        """None: a peer was lost at its launch."""
        self._has_ended = False
        with suppress(PeerLost):  # the wait launches it again
            self.pending = launch()

    @property
    def is_settled(self) -> bool:
        return self._has_ended or (self.pending is not None and self.pending.is_settled)

    def wait(self) -> None:
        """StepCancelled: the script is to be called again."""
        while not self._has_ended:
            try:
                if self.pending is None:
                    self.pending = self._launch()
                self.pending.wait()
            except PeerLost as error:
                self._group.hear_failure(error)
                self.pending = None
                self._has_ended = self._course.mend_collective(error, self._own)
            else:
                self._has_ended = True
                self._course.end_collective(self._own)


class FutureWork(TorchWork):
    """Operations in flight, with a future."""

    def __init__(self, group: DefaultGroup, *pending: Settling) -> None:
        super().__init__(*pending)
        self._group = group
        self.result: list[Tensor] = []
        self._future: _Future | None = None

    def wait(self, *timeout: Any) -> bool:
        """Raises PeerLost."""
        try:
            with self._group.waiting(f"torch.distributed's {self._group.launched}"):
                super().wait()
        except PeerLost as error:
            self._group.hear_failure(error)
            raise
        return True

    def get_future(self) -> Any:
        """Its value is the result; what is in it where a peer is lost is garbage. An error that
        Python sets is none to torch's C++, which would take it for tensors."""
        if self._future is None:
            self._future = self._group.future_of(self._pending[0], self.result)
        return self._future


class _Future(torch.futures.Future[Any]):
    """Ends once, with the collective or with its group."""

    def __init__(self, result: list[Tensor], on_failure: Callable[[PeerLost], None]) -> None:
        super().__init__()
        self._result, self._on_failure = result, on_failure

    def end(self, done: Any) -> None:
        """In the backend's thread."""
        try:
            done.value()
        except RuntimeError as error:
            self.give_up(PeerLost(str(error)))
            return
        if not self.done():
            self._end_with(self._result)

    def give_up(self, error: PeerLost) -> None:
        if not self.done():
            self._on_failure(error)
            self._end_with(self._result)

    def _end_with(self, value: Any) -> None:
        try:
            self.set_result(value)
        except RuntimeError:  # another thread was first
            return


@contextmanager
def as_default(group: DefaultGroup) -> Iterator[None]:
    """Within, `group` is the process's default group, and torch says that it is initialised."""
    before = dist.group.WORLD
    name = registry.unused(f"{group.getGroupName()}/default")
    group.getGroupName = lambda: name  # type: ignore[method-assign]
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    registry.register(group, group.inner.backend_name, range(group.size()), store)
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before
        group.leave()
