"""The group that carries a device's tensors through pinned host memory and gloo. Ranks may share
one GPU in it, which NCCL refuses; it is slower than NCCL.

What is sent is copied on the current stream, and the host goes on. A thread of the group hands it
to gloo once it has come, in the order of the launches. Who waits gets the results on its own
stream.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from workers.distributed import gloo
from workers.distributed.device_wait import wait_for
from workers.distributed.group_spec import GroupSpec
from workers.distributed.pending import Pending, Waitable
from workers.distributed.process_group import Group

Tensors: TypeAlias = "Tensor | Sequence[Tensors]"


class StagedGroup(Group):
    """A wait blocks the host and raises, as gloo's does: no result is garbage."""

    backend_name = "gloo"

    def __init__(self, host: Group, spec: GroupSpec) -> None:
        """host: of the same ranks, for host memory; it is given up and left with this one."""
        self._launched: SimpleQueue[Carried | None] = SimpleQueue()
        carrier = Carrier(host, self._launched.put)
        super().__init__(carrier, spec.rank, spec.world_size, spec.name, spec.store)
        host.on_wait = lambda number, what, size, part: self.on_wait(number, what, size, part)
        self.adopt(host)
        threading.Thread(target=self._hand_over, name="staged", daemon=True).start()

    def finish(self, pending: Pending) -> None:
        carried = cast(Carried, pending.work)
        if not carried.is_handed_over:
            with self.waiting_for("compute"), self.changed:
                self.changed.wait_for(lambda: carried.is_handed_over or self.is_abandoned)
        self.check()
        if not carried.is_completed():
            with self.waiting_for("gather"):
                carried.wait()
        self.check()
        carried.bring_back()

    def abandon(self) -> None:
        super().abandon()
        self._launched.put(None)

    def _hand_over(self) -> None:
        while not (self.is_abandoned and self._launched.empty()):
            if (carried := self._launched.get()) is not None:
                carried.hand_over(self.check)
            with self.changed:
                self.changed.notify_all()


class Carried:
    """An operation: what is sent comes to the host, gloo does the rest there."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._received: list[tuple[Tensor, Tensor]] = []
        self._came: torch.Event | None = None
        self._work: Waitable | None = None
        self._error: Exception | None = None
        self._launch: Callable[[], Any] = lambda: None

    # --- in the thread that launches ----------------------------------------------------------
    def send(self, tensors: Tensors) -> Any:
        """Their like in host memory, which holds the same when gloo gets it."""
        return self._twins_of(tensors, lambda own, twin: twin.copy_(own, non_blocking=True))

    def receive(self, tensors: Tensors) -> Any:
        """Their like in host memory; they hold in the end what gloo has written there."""
        return self._twins_of(tensors, lambda own, twin: self._received.append((own, twin)))

    def _twins_of(self, tensors: Tensors, each: Callable[[Tensor, Tensor], object]) -> Any:
        if not isinstance(tensors, Tensor):
            return [self._twins_of(t, each) for t in tensors]
        if tensors.device.type == "cpu":
            return tensors
        if id(tensors) not in self._twins:
            twin = torch.empty(tensors.shape, dtype=tensors.dtype, pin_memory=True)
            self._twins[id(tensors)] = tensors, twin
        twin = self._twins[id(tensors)][1]
        each(tensors, twin)
        return twin

    def close(self, launch: Callable[[], Any]) -> None:
        """All that is to be sent is on its way. launch: gloo's operation on the twins."""
        for own, _ in self._twins.values():
            self._came = torch.accelerator.current_stream(own.device).record_event()
            break
        self._launch, self._twins = launch, {}

    # --- in the group's -------------------------------------------------------------------------
    def hand_over(self, check: Callable[[], None]) -> None:
        try:
            if self._came is not None:
                wait_for(self._came, check)
            self._work = self._launch()
        except Exception as error:
            self._error = error

    # --- in the one that waits ------------------------------------------------------------------
    @property
    def is_handed_over(self) -> bool:
        return self._work is not None or self._error is not None

    def is_completed(self) -> bool:
        return self._error is not None or (self._work is not None and self._work.is_completed())

    def wait(self, *_: Any) -> None:
        """Raises PeerLost."""
        if self._error is not None:
            raise self._error
        assert self._work is not None
        self._work.wait()

    def bring_back(self) -> None:
        """The results are there once the current stream comes to here. Raises PeerLost."""
        self.wait()
        for own, twin in self._received:
            stream = torch.accelerator.current_stream(own.device)
            if self._came is not None:  # their memory was free to be written then, on that stream
                stream.wait_event(self._came)
            own.copy_(twin, non_blocking=True)
        self._received = []

    def get_future(self) -> Any:
        raise NotImplementedError("whoever waits asks the group")


class Carrier:
    """A backend as c10d.py calls one: each operation is gloo's, of tensors on a device."""

    def __init__(self, host: Group, take: Callable[[Carried], None]) -> None:
        self._host, self._take = host, take

    def _carry(
        self, received: Tensors, sent: Tensors, launch: Callable[[Any, Any], Any]
    ) -> Carried:
        """launch: with their twins, in this order."""
        carried = Carried()
        to_receive, to_send = carried.receive(received), carried.send(sent)
        carried.close(lambda: launch(to_receive, to_send))
        self._take(carried)
        return carried

    # --- in place ---------------------------------------------------------------------------
    def allreduce(self, tensors: list[Tensor], *options: Any) -> Carried:
        return self._carry(tensors, tensors, lambda _, t: self._host.allreduce(t, *options))

    def broadcast(self, tensors: list[Tensor], *options: Any) -> Carried:
        return self._carry(tensors, tensors, lambda _, t: self._host.broadcast(t, *options))

    def reduce(self, tensors: list[Tensor], options: Any) -> Carried:
        is_root = options.rootRank == self._host.rank()
        received = tensors if is_root else []  # gloo writes everywhere
        return self._carry(received, tensors, lambda _, t: self._host.reduce(t, options))

    # --- from one place to another ------------------------------------------------------------
    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], *options: Any
    ) -> Carried:
        return self._carry(outputs, tensors, lambda o, t: self._host.allgather(o, t, *options))

    def _allgather_base(self, output: Tensor, tensor: Tensor, *options: Any) -> Carried:
        return self._carry(
            output, tensor, lambda o, t: self._host.all_gather_single(o, t, *options)
        )

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> Carried:
        return self._carry(outputs, tensors, lambda o, t: self._host.gather(o, t, options))

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], options: Any) -> Carried:
        return self._carry(outputs, tensors, lambda o, t: self._host.scatter(o, t, options))

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], options: Any
    ) -> Carried:
        return self._carry(outputs, tensors, lambda o, t: self._host.reduce_scatter(o, t, options))

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, options: Any) -> Carried:
        return self._carry(
            output, tensor, lambda o, t: self._host.reduce_scatter_single(o, t, options)
        )

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, out_sizes: Any, in_sizes: Any, *options: Any
    ) -> Carried:
        out, in_ = list(out_sizes), list(in_sizes)
        return self._carry(
            output, tensor, lambda o, t: self._host.all_to_all_single(o, t, out, in_, *options)
        )

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], options: Any) -> Carried:
        return self._carry(outputs, tensors, lambda o, t: self._host.alltoall(o, t, options))

    # --- between two, and none ----------------------------------------------------------------
    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Carried:
        return self._carry([], tensors, lambda _, t: self._host.send(t, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Carried:
        return self._carry(tensors, [], lambda t, _: self._host.recv(t, peer, tag))

    def barrier(self, options: Any) -> Carried:
        return self._carry([], [], lambda *_: self._host.barrier(options))


def connect(host: str, spec: GroupSpec) -> StagedGroup:
    """The group of this name, once all its members are here. host: this worker's address."""
    return StagedGroup(gloo.connect(host, replace(spec, name=f"{spec.name}/staged")), spec)
