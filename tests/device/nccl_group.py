"""What NCCL does between ranks, on simulated devices: late results, aborts with garbage, no errors.

`SimulatedNccl` has the methods that a group asks of torch's ProcessGroupNCCL. Its ranks are threads
of one process, each on a device of its own, or processes.
"""

import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import DistBackendError

from tests.device.device import SIM

POLL_S = 0.002
CONNECT_S = 60.0
"""TORCH_NCCL_NONBLOCKING_TIMEOUT: how long a launch waits until the ranks are connected."""


class Work:
    """A collective on its way. It keeps its tensors until somebody has waited, as NCCL's does."""

    def __init__(self, group: "SimulatedNccl", event: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._group, self._event, self._tensors = group, event, tuple(tensors)

    def block_current_stream(self) -> None:
        """Orders the current stream behind the collective. The host does not wait."""
        self._event.make_current_stream_wait()
        self._tensors = ()

    def wait(self, timeout: Any = None) -> bool:
        """The same here, where torch's blocks the host. Raises what NCCL has noticed."""
        if text := self._group.communicator.error():
            raise DistBackendError(text)
        self.block_current_stream()
        return True

    def is_completed(self) -> bool:
        """Also if NCCL has noticed that a peer is gone."""
        return bool(self._group.communicator.error()) or self._event.is_done()


class SimulatedNccl:
    """One rank's communicator."""

    def __init__(
        self, connect: Callable[[], Any], rank: int, size: int, *, device: torch.device
    ) -> None:
        """connect: gives a connection of its own to the store over which the ranks meet; its `get`
        waits for a moment at least. Forming begins with `eager_connect_single_device`."""
        self._connect, self._rank, self._size = connect, rank, size
        self._device = device
        self._is_aborted, self._has_formed = threading.Event(), threading.Event()
        self._lock, self.connect_s = threading.Lock(), CONNECT_S
        self.communicator: Any = None
        self.before_launch: Callable[[str], None] = lambda name: None
        """Told in the thread that launches a collective; what it raises goes to the caller."""
        self.num_launches = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # --- forming -------------------------------------------------------------------------
    def eager_connect_single_device(self, device: torch.device) -> None:
        """Waits for all peers, for ever: an absent one is not noticed. Only `abort` ends it."""
        store = self._connect()
        if self._rank == 0:
            store.set("nccl/id", uuid.uuid4().hex)
        name = self._ask("nccl/id").decode()
        store.set(f"nccl/{name}/of/{self._rank}", str(os.getpid()))
        pids = {self._ask(f"nccl/{name}/of/{r}") for r in range(self._size)}
        is_local = len(pids) == 1
        self.communicator = SIM.Communicator(name, self._rank, self._size, device.index, is_local)
        self.communicator.connect()
        while not self.communicator.is_connected():
            self._check_abort()
            time.sleep(POLL_S)
        if not is_local:
            peers = [r for r in range(self._size) if r != self._rank]
            for target, arguments in [(self._send, ()), *((self._receive, (r,)) for r in peers)]:
                threading.Thread(target=target, args=arguments, name="nccl", daemon=True).start()
        self._has_formed.set()

    def begin_connect(self, device: torch.device) -> None:
        """As with `config.blocking = 0`: in the background. The first launch waits for it."""
        arguments = {"args": (device,), "daemon": True}
        self.connecting = threading.Thread(target=self._connect_quietly, **arguments)
        self.connecting.start()

    def _connect_quietly(self, device: torch.device) -> None:
        try:
            self.eager_connect_single_device(device)
        except DistBackendError:
            return  # aborted: nobody asks any more

    def _wait_until_connected(self) -> None:
        """As torch does: nothing ends that but its time limit, `abort` waits for it as well."""
        with self._lock:
            if self._is_aborted.is_set():
                raise DistBackendError("the communicator was aborted")
            if not self._has_formed.wait(self.connect_s):
                raise DistBackendError("NCCL timeout: the ranks are not connected")

    def _ask(self, key: str) -> bytes:
        """Waits as long as nobody has set it: a store's own limit is none of NCCL's."""
        while True:
            self._check_abort()
            try:
                return bytes(self._connect().get(key))
            except Exception:
                time.sleep(POLL_S)

    def _check_abort(self) -> None:
        if self._is_aborted.is_set():
            raise DistBackendError("ncclCommInitRankConfig was aborted")

    # --- between processes: parts go through the store ---------------------------------------
    def _send(self) -> None:
        store, name = self._connect(), self.communicator.name
        while not self._is_aborted.is_set():
            sent = self.communicator.next_outgoing(1.0)
            if sent is not None:
                number, part = sent
                store.set(f"nccl/{name}/{number}/{self._rank}", part)

    def _receive(self, peer: int) -> None:
        name = self.communicator.name
        store = self._connect()
        for number in itertools.count():
            key = f"nccl/{name}/{number}/{peer}"
            while not self._is_aborted.is_set():
                try:
                    self.communicator.deliver(number, peer, bytes(store.get(key)))
                    break
                except Exception:
                    store = self._connect()

    # --- collectives -----------------------------------------------------------------------
    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        return self._launch(SIM.Kind.all_reduce, tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        root = 0 if options is None else options.rootRank
        return self._launch(SIM.Kind.broadcast, tensors, tensors, root=root)

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        tensors: list[torch.Tensor],
        options: Any = None,
    ) -> Work:
        return self._launch(SIM.Kind.all_gather, outputs[0], tensors)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None
    ) -> Work:
        return self._launch(SIM.Kind.all_gather, [output], [tensor])

    def _reduce_scatter_base(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None
    ) -> Work:
        return self._launch(SIM.Kind.reduce_scatter, [output], [tensor])

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: list[int],
        in_sizes: list[int],
        options: Any = None,
    ) -> Work:
        row = tensor.shape[1:].numel()
        expected = sum(out_sizes) * row if out_sizes else tensor.numel()
        assert expected == output.numel(), (out_sizes, output.shape)
        return self._launch(SIM.Kind.all_to_all, [output], [tensor], in_sizes=in_sizes)

    def _launch(
        self,
        kind: Any,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        **options: Any,
    ) -> Work:
        self._wait_until_connected()
        if any(t.is_complex() for t in (*outputs, *inputs)):
            raise TypeError("Unconvertible NCCL type")
        self.before_launch(kind.name)
        self.num_launches += 1
        event = self.communicator.launch(kind, list(outputs), list(inputs), **options)
        return Work(self, event, [*outputs, *inputs])

    # --- the end --------------------------------------------------------------------------
    def abort(self) -> None:
        """Whatever waits for a result finds garbage and no error; new collectives are refused."""
        with self._lock:
            self._is_aborted.set()
            if self.communicator is not None:
                self.communicator.abort()

    shutdown = abort

    def lose_peer(self, rank: int) -> None:
        """NCCL has noticed that it is gone: works say so, results still do not come."""
        text = f"NCCL error: remote process exited or there was a network error (rank {rank})"
        self.communicator.lose(f"{text}, ncclRemoteError")

    def hold(self, is_held: bool) -> None:
        """While it is held no result comes."""
        self.communicator.hold(is_held)
