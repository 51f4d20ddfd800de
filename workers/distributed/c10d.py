"""A process group's operations: as our own code calls them, and with the signatures of c10d as
torch's does.

Which backend makes them, and how a wait is given up, is elsewhere (process_group.py).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed.distributed_c10d import (
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
    AllreduceCoalescedOptions,
)

from workers.distributed.pending import Settling, TorchWork, Waitable
from workers.torch_private import c10d as private

GATHER, ALL_GATHER = GatherOptions(), AllgatherOptions()
SCATTER, REDUCE_SCATTER = ScatterOptions(), ReduceScatterOptions()
REDUCE, ALL_REDUCE = ReduceOptions(), AllreduceOptions()
ALL_REDUCES, ALL_TO_ALL = AllreduceCoalescedOptions(), AllToAllOptions()
BROADCAST, BARRIER = BroadcastOptions(), BarrierOptions()
"""What torch's code leaves out: how it sums is then a sum, and who is first is rank 0."""


class C10dGroup(dist.ProcessGroup):
    """c10d's operations over one of torch's backends."""

    backend: Any

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # pyright: ignore[reportCallIssue]  (not in the stub)
        self._works: WeakSet[TorchWork] = WeakSet()

    @abstractmethod
    def _launch(self, what: tuple[str, int], launch: Callable[[], Any]) -> Settling:
        """A collective. what: its name, and its elements (0 where ranks may differ)."""

    def _waitable(self, work: Any, name: str = "") -> Waitable:
        """What has no future of its own, as something that may be given up."""
        return work

    @abstractmethod
    def _exchange(self, what: tuple[str, int, int], launch: Callable[[], Any]) -> Settling:
        """Between two ranks. what: its name, its elements, and the peer."""

    def allreduce(self, tensors: list[Tensor], opts: Any = ALL_REDUCE) -> TorchWork:
        what = ("all_reduce", _numel(tensors))
        return self._work(self._launch(what, lambda: self.backend.allreduce(tensors, opts)))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = ALL_REDUCES) -> TorchWork:
        how = AllreduceOptions()
        how.reduceOp, how.timeout = opts.reduceOp, opts.timeout
        return self._work(
            *(
                self._launch(
                    ("all_reduce", t.numel()), lambda t=t: self.backend.allreduce([t], how)
                )
                for t in tensors
            )
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = BROADCAST) -> TorchWork:
        what = ("broadcast", _numel(tensors))
        return self._work(self._launch(what, lambda: self.backend.broadcast(tensors, opts)))

    def reduce(self, tensors: list[Tensor], opts: Any = REDUCE) -> TorchWork:
        what = ("reduce", _numel(tensors))
        return self._work(self._launch(what, lambda: self.backend.reduce(tensors, opts)))

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = ALL_GATHER
    ) -> TorchWork:
        what = ("all_gather", _numel(tensors))
        return self._work(
            self._launch(what, lambda: self.backend.allgather(outputs, tensors, opts))
        )

    def all_gather_single(
        self, output: Tensor, tensor: Tensor, opts: Any = ALL_GATHER
    ) -> TorchWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = ALL_GATHER
    ) -> TorchWork:
        return self._work(
            *(
                self._launch(
                    ("all_gather", t.numel()),
                    lambda o=o, t=t: private.all_gather_flat(self.backend, o, t, opts),
                )
                for o, t in zip(outputs, tensors, strict=True)
            )
        )

    def gather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = GATHER
    ) -> TorchWork:
        what = ("gather", _numel(tensors))
        return self._work(self._launch(what, lambda: self.backend.gather(outputs, tensors, opts)))

    def scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = SCATTER
    ) -> TorchWork:
        what = ("scatter", _numel(outputs))
        return self._work(self._launch(what, lambda: self.backend.scatter(outputs, tensors, opts)))

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = REDUCE_SCATTER
    ) -> TorchWork:
        what = ("reduce_scatter", _numel(outputs))
        return self._work(
            self._launch(
                what, lambda: self._waitable(self.backend.reduce_scatter(outputs, tensors, opts))
            )
        )

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: Any = REDUCE_SCATTER
    ) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = REDUCE_SCATTER
    ) -> TorchWork:
        return self._work(
            *(
                self._launch(
                    ("reduce_scatter", o.numel()),
                    lambda o=o, t=t: self._waitable(
                        private.reduce_scatter_flat(self.backend, o, t, opts)
                    ),
                )
                for o, t in zip(outputs, tensors, strict=True)
            )
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        opts: Any = ALL_TO_ALL,
    ) -> TorchWork:
        return self._work(
            self._launch(
                ("all_to_all", 0),
                lambda: self.backend.alltoall_base(output, tensor, out_sizes, in_sizes, opts),
            )
        )

    def alltoall(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = ALL_TO_ALL
    ) -> TorchWork:
        what = ("all_to_all", 0)
        return self._work(self._launch(what, lambda: self.backend.alltoall(outputs, tensors, opts)))

    def barrier(self, opts: Any = BARRIER) -> TorchWork:
        return self._work(self._launch(("barrier", 0), lambda: self.backend.barrier(opts)))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> TorchWork:
        what = ("send", _numel(tensors), peer)
        return self._work(self._exchange(what, lambda: self.backend.send(tensors, peer, tag)))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> TorchWork:
        what = ("recv", _numel(tensors), peer)
        return self._work(self._exchange(what, lambda: self.backend.recv(tensors, peer, tag)))

    def post(self, tensor: Tensor, peer: int, tag: int) -> dist.Work | None:
        """Send what nobody waits for soon: the work, or None where `posted` has it."""
        return self.send([tensor], peer, tag)

    def posted(self) -> dist.Work:
        """What was posted since this was last asked, as one."""
        return self._work()

    # the names that torch 2.13 calls deprecated, and other versions know only
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    def _work(self, *pending: Settling) -> TorchWork:
        work = TorchWork(*pending)
        self._works.add(work)
        return work

    def _drop(self) -> None:
        """Nobody waits any more for what is in flight, and nothing keeps it alive."""
        for work in self._works:
            work.drop()


class CollectiveGroup(C10dGroup):
    """The collectives that our own code calls; they return what is in flight."""

    def __init__(self, backend: Any, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.backend = backend

    @abstractmethod
    def _launch(
        self,
        what: tuple[str, int],
        launch: Callable[[], Any],
        unpack: Callable[[], None] | None = None,
    ) -> Settling: ...

    def all_reduce(self, tensor: Tensor) -> Settling:
        """Sum `tensor` in place over the ranks."""
        tensor = _real(tensor)
        what = ("all_reduce", tensor.numel())
        return self._launch(what, lambda: self.backend.allreduce([tensor]))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Settling:
        """`outputs[r]` becomes rank r's `tensor`; one dtype, sizes may differ."""
        outputs, tensor = [_real(t) for t in outputs], _real(tensor)
        if len({t.numel() for t in outputs}) == 1:
            what = ("all_gather", tensor.numel())
            return self._launch(what, lambda: self.backend.allgather([list(outputs)], [tensor]))
        return self.all_to_all(outputs, [tensor] * self.size())

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Settling:
        """`outputs[r]` becomes rank r's `inputs[rank]`. One-dimensional, one dtype, any sizes."""
        inputs, outputs = [_real(t) for t in inputs], [_real(t) for t in outputs]
        sent = torch.cat([t.reshape(-1) for t in inputs])
        received = torch.empty(
            sum(t.numel() for t in outputs), dtype=sent.dtype, device=sent.device
        )
        in_sizes, out_sizes = [t.numel() for t in inputs], [t.numel() for t in outputs]

        def unpack() -> None:
            for out, part in zip(outputs, received.split(out_sizes), strict=True):
                out.copy_(part.view_as(out))

        def launch() -> Any:
            return self.backend.alltoall_base(received, sent, out_sizes, in_sizes)

        return self._launch(("all_to_all", 0), launch, unpack)

    def all_gather_flat(self, output: Tensor, tensor: Tensor) -> Settling:
        """`output` becomes the ranks' tensors in a row; `tensor` may be its own part of it."""
        output, tensor = _real(output), _real(tensor)
        what = ("all_gather", tensor.numel())
        return self._launch(what, lambda: private.all_gather_flat(self.backend, output, tensor))

    def all_to_all_flat(
        self,
        output: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> Settling:
        """Both flat and cut into `world_size` stretches, of these sizes or else equal: stretch r of
        `output` becomes rank r's stretch `rank` of `tensor`."""
        each = 2 if tensor.is_complex() else 1
        out, in_ = [each * n for n in out_sizes], [each * n for n in in_sizes]
        output, tensor = _real(output), _real(tensor)
        what = ("all_to_all", 0 if in_ else tensor.numel())
        return self._launch(what, lambda: self.backend.alltoall_base(output, tensor, out, in_))

    def free(self) -> None:
        """The threads, connections and buffers of its backend, whoever still knows the group."""
        self.backend = None


def _real(tensor: Tensor) -> Tensor:
    """The same memory. No backend knows complex numbers; each is two real ones, which add alike."""
    return tensor.view(-1).view(tensor.dtype.to_real()) if tensor.is_complex() else tensor


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


class Copies:
    """A backend of one rank, for c10d's names."""

    def allreduce(self, tensors: list[Tensor], opts: Any) -> None: ...
    def broadcast(self, tensors: list[Tensor], opts: Any) -> None: ...
    def reduce(self, tensors: list[Tensor], opts: Any) -> None: ...
    def barrier(self, opts: Any) -> None: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> None:
        output.copy_(tensor.view_as(output))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, out_sizes: Any, in_sizes: Any, opts: Any
    ) -> None:
        output.copy_(tensor)

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> None:
        outputs[0].copy_(tensors[0])

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> None:
        outputs[0][0].copy_(tensors[0])

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> None:
        outputs[0].copy_(tensors[0][0])

    _reduce_scatter_base, gather, reduce_scatter = _allgather_base, allgather, scatter
