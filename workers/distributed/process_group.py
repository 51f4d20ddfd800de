"""The process group of one generation: forming it, reducing over it, and walking away from it.

Backends are used directly, without torch's global registry of groups: a generation's group is a
value that is dropped whole. What is reduced lives in workers/reduction.

A gloo operation whose peer is frozen cannot be aborted (measured, torch 2.13), so a survivor
abandons it: waiting ends at once, the group is kept until its threads have come back, and nobody
reuses a buffer that an abandoned operation may still write.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from elastic.protocol.errors import CollectiveRefused, PeerLost
from elastic.protocol.messages.to_worker import Form
from elastic.protocol.worker_spec import WorkerSpec
from workers.distributed.store import StoreClient

REFUSALS = ("ncclInvalidArgument", "ncclInvalidUsage", "ncclUnhandledCudaError")
"""NCCL's words for a call that no peer's death explains."""
DIRECT_WAIT = timedelta(milliseconds=10)
"""So long a wait is the backend's own, which costs no change of threads in Python. Nothing ends it
but the collective: an abandonment may be noticed so much later."""
_left_behind: list["AnyGroup"] = []


class Backend(Protocol):
    """What a `Group` asks of gloo and NCCL; torch's stub of its Backend has no collectives."""

    def allreduce(self, tensors: list[torch.Tensor], /) -> dist.Work: ...

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], /
    ) -> dist.Work: ...

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, /) -> dist.Work: ...

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, outputs: list[int], inputs: list[int], /
    ) -> dist.Work: ...

    def abort(self) -> None: ...


class Pending:
    """A collective in flight. `wait()` raises PeerLost if it fails or its group is abandoned."""

    def __init__(
        self,
        group: "Group",
        work: dist.Work,
        unpack: Callable[[], None] | None,
        what: tuple[int, str, int],
    ) -> None:
        self._group, self._work, self._unpack, self._what = group, work, unpack, what
        self._is_done = False

    def wait(self) -> None:
        group = self._group
        if not self._work.is_completed():
            group.on_wait(*self._what, "")
            if group.backend_name == "gloo" and not group.is_abandoned:
                self._wait_for_gloo()
        if group.is_abandoned:
            raise PeerLost("the generation was given up")
        try:
            self._work.wait()
            if group.backend_name == "nccl":
                # Ordered on the stream only; the host learns of a failure at the next
                # synchronisation, which is the vote's read-back.
                group.check_nccl()
        except RuntimeError as error:
            raise failure_of(error) from error
        if self._unpack is not None:
            self._unpack()

    def _wait_for_gloo(self) -> None:
        """Until it is done or its group is abandoned."""
        with suppress(RuntimeError):  # it took longer, or failed, which is looked at again
            self._work.wait(DIRECT_WAIT)
        if not self._work.is_completed():
            self._work.get_future().add_done_callback(self._on_done)
            with self._group.changed:
                self._group.changed.wait_for(lambda: self._is_done or self._group.is_abandoned)

    def _on_done(self, _: object) -> None:
        with self._group.changed:
            self._is_done = True
            self._group.changed.notify_all()

    @property
    def is_settled(self) -> bool:
        return self._work.is_completed()


def failure_of(error: RuntimeError) -> PeerLost:
    """What a backend raises while it waits is of the connections, whatever it says; except for an
    error of this device, and for NCCL's that name a wrong call."""
    text = str(error)
    if isinstance(error, torch.AcceleratorError) or any(words in text for words in REFUSALS):
        return CollectiveRefused(text)
    return PeerLost(text)


class Group:
    """Collectives among the members of one generation.

    Every method returns a `Pending`; sums are over ranks. Tensors live on `device`.
    """

    def __init__(
        self,
        backend: Backend,
        backend_name: str,
        rank: int,
        world_size: int,
        store: StoreClient | None = None,
    ) -> None:
        """store: what the backend was formed over, kept as long as the backend may ask it."""
        self.backend, self.backend_name, self._store = backend, backend_name, store
        self._rank, self._size = rank, world_size
        self.changed = threading.Condition()
        self.is_abandoned = False
        self.on_wait: Callable[[int, str, int, str], None] = lambda number, name, size, part: None
        """Told before a wait: which collective of the group, its name, its elements (0 where
        ranks may differ), and the name of the part whose it is."""
        self._num_launched = 0
        self._pending: deque[Pending] = deque()
        self._parts: list[Group | Formation] = []
        self.form_part: FormPart | None = None
        """Forms another group over the same store; None: this group has no parts."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def part(self, name: str, ranks: Sequence[int], timeout_s: float) -> "AnyGroup":
        """The group of some of the ranks, this one among them, in that order; it is given up with
        this one. All of them must ask for it by the same name. Raises PeerLost."""
        if len(ranks) == 1:
            return Alone()
        if list(ranks) == list(range(self._size)):
            return self
        assert self.form_part is not None
        formation = self.form_part(name, list(ranks).index(self._rank), len(ranks))
        self._adopt(formation)
        part = formation.wait(timeout_s)
        part.on_wait = lambda number, what, size, _: self.on_wait(number, what, size, name)
        self._adopt(part)
        return part

    def _adopt(self, part: "Group | Formation") -> None:
        with self.changed:
            self._parts.append(part)
            is_late = self.is_abandoned
        if is_late:
            part.abandon()

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Sum `tensor` in place over the ranks."""
        what = ("all_reduce", tensor.numel())
        return self._launch(what, lambda: self.backend.allreduce([tensor]))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """`outputs[r]` becomes rank r's `tensor`; one dtype, sizes may differ."""
        if len({t.numel() for t in outputs}) == 1:
            what = ("all_gather", tensor.numel())
            return self._launch(what, lambda: self.backend.allgather([list(outputs)], [tensor]))
        return self.all_to_all(outputs, [tensor] * self._size)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Pending:
        """`outputs[r]` becomes rank r's `inputs[rank]`. One-dimensional, one dtype, any sizes."""
        sent = torch.cat([t.reshape(-1) for t in inputs])
        received = torch.empty(
            sum(t.numel() for t in outputs), dtype=sent.dtype, device=sent.device
        )
        in_sizes, out_sizes = [t.numel() for t in inputs], [t.numel() for t in outputs]

        def unpack() -> None:
            for out, part in zip(outputs, received.split(out_sizes), strict=True):
                out.copy_(part.view_as(out))

        def launch() -> dist.Work:
            return self.backend.alltoall_base(received, sent, out_sizes, in_sizes)

        return self._launch(("all_to_all", 0), launch, unpack)

    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """`output` becomes the ranks' tensors in a row; `tensor` may be its own part of it."""
        what = ("all_gather", tensor.numel())
        return self._launch(what, lambda: self.backend._allgather_base(output, tensor))

    def all_to_all_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> Pending:
        """Both flat and cut into `world_size` stretches, of these sizes or else equal: stretch r of
        `output` becomes rank r's stretch `rank` of `tensor`."""
        sizes = list(out_sizes), list(in_sizes)
        what = ("all_to_all", 0 if in_sizes else tensor.numel())
        return self._launch(what, lambda: self.backend.alltoall_base(output, tensor, *sizes))

    def _launch(
        self,
        what: tuple[str, int],
        launch: Callable[[], dist.Work],
        unpack: Callable[[], None] | None = None,
    ) -> Pending:
        if self.is_abandoned:
            raise PeerLost("the generation was given up")
        try:
            work = launch()
        except RuntimeError as error:
            if self.backend_name == "gloo":  # which connects and sends in threads of its own
                raise CollectiveRefused(str(error)) from error
            raise failure_of(error) from error
        while self._pending and self._pending[0].is_settled:  # the oldest settle first, mostly
            self._pending.popleft()
        self._num_launched += 1
        pending = Pending(self, work, unpack, (self._num_launched, *what))
        self._pending.append(pending)
        return pending

    def check_nccl(self) -> None:
        if self.is_abandoned:
            raise PeerLost("the generation was given up")

    def abandon(self) -> None:
        """Wake whoever waits; from now on every operation raises PeerLost. Any thread may call."""
        with self.changed:
            self.is_abandoned = True
            self.changed.notify_all()
            parts = list(self._parts)
        for part in parts:
            part.abandon()
        if self.backend_name == "nccl":
            self.backend.abort()

    @property
    def is_settled(self) -> bool:
        groups = [part for part in self._parts if isinstance(part, Group)]
        return all(p.is_settled for p in (*self._pending, *groups))


class Alone:
    """The group of a single member: nothing to exchange, so it cannot fail."""

    def __init__(self) -> None:
        self.is_abandoned = False

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def part(self, name: str, ranks: Sequence[int], timeout_s: float) -> "Alone":
        return self

    def all_reduce(self, tensor: torch.Tensor) -> "Alone":
        return self

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> "Alone":
        outputs[0].copy_(tensor)
        return self

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> "Alone":
        outputs[0].copy_(inputs[0])
        return self

    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> "Alone":
        output.copy_(tensor)
        return self

    def all_to_all_flat(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> "Alone":
        output.copy_(tensor)
        return self

    def wait(self) -> None:
        if self.is_abandoned:
            raise PeerLost("the generation was given up")

    def abandon(self) -> None:
        self.is_abandoned = True

    @property
    def is_settled(self) -> bool:
        return True


AnyGroup = Group | Alone
FormPart = Callable[[str, int, int], "Formation"]
"""(name, rank, world size)"""


class Formation:
    """A group being formed in a thread, so that forming can be given up as well."""

    def __init__(self, form: Callable[[], Group]) -> None:
        self.changed = threading.Condition()
        self._group: Group | None = None
        self._error: Exception | None = None
        self._is_abandoned = False
        thread = threading.Thread(target=self._run, args=(form,), name="form", daemon=True)
        thread.start()

    def _run(self, form: Callable[[], Group]) -> None:
        group, error = None, None
        try:
            group = form()
        except Exception as e:
            error = e
        with self.changed:
            self._group, self._error = group, error
            self.changed.notify_all()

    def abandon(self) -> None:
        with self.changed:
            self._is_abandoned = True
            self.changed.notify_all()

    def wait(self, timeout_s: float) -> Group:
        """The group; PeerLost if it cannot be formed in `timeout_s` or is given up."""
        with self.changed:
            self.changed.wait_for(
                lambda: self._group or self._error or self._is_abandoned, timeout_s
            )
            if self._is_abandoned:
                raise PeerLost("the generation was given up while it formed")
            if self._group is not None:
                return self._group
            if self._error is not None:
                raise PeerLost(f"forming failed: {self._error}") from self._error
        raise PeerLost(f"forming did not finish in {timeout_s:g} s")


def form(
    *,
    store_address: Sequence[Any],
    prefix: str,
    rank: int,
    world_size: int,
    host: str,
    device: torch.device,
    join_timeout_s: float,
    operation_timeout_s: float,
) -> Formation:
    """Begin to form the group named `prefix` over the rendezvous store at `store_address`.

    store_address: host, port and secret.
    host: this worker's address that its peers can reach.
    operation_timeout_s: the backend's own limit per collective, a last resort only.
    """

    def build(prefix: str, rank: int, world_size: int) -> Group:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = StoreClient(store_address, join_timeout_s)
        prefixed = PrefixStore(prefix, store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=operation_timeout_s)
            nccl = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
            nccl.eager_connect_single_device(device)
            return Group(cast(Any, nccl), "nccl", rank, world_size, store)
        gloo = cast(Any, dist.ProcessGroupGloo)._Options()  # the stub calls it Options
        gloo._timeout = timedelta(seconds=operation_timeout_s)
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return Group(
            cast(Any, dist.ProcessGroupGloo(prefixed, rank, world_size, gloo)),
            "gloo",
            rank,
            world_size,
            store,
        )

    def build_whole() -> Group:
        group = build(prefix, rank, world_size)
        group.form_part = lambda name, r, size: Formation(
            lambda: build(f"{prefix}/{name}", r, size)
        )
        return group

    return Formation(build_whole)


def form_for(spec: WorkerSpec, command: Form, device: torch.device) -> Formation:
    """The group that it asks for, of more than one rank."""
    assert command.store is not None
    return form(
        store_address=command.store,
        prefix=f"{spec.run_id}/{command.generation}",
        rank=command.rank,
        world_size=command.world_size,
        host=spec.host,
        device=device,
        join_timeout_s=spec.join_timeout_s,
        operation_timeout_s=spec.operation_timeout_s,
    )


def leave(group: AnyGroup) -> None:
    """Give up `group` and free every left group whose operations have come back by now."""
    if not group.is_abandoned:
        group.abandon()
    _left_behind.append(group)
    _left_behind[:] = [g for g in _left_behind if not g.is_settled]
