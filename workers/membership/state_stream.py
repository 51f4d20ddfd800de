"""State from worker to worker: a snapshot, then every committed step's update.

A newcomer *follows* a source: it receives the source's state as of a step boundary and then the
reduced gradients of each later step, which it applies with its own optimizer. So it stays at most
a step behind, at a cost per step that does not depend on the size of the optimizer's state, and
nobody waits for it. Where a link carries less than the steps bring, it *lags*: it is sent nothing
more until a generation takes it in, and then the state anew, for which the others wait.
Point to point over TCP, no pickle (elastic/protocol/wire.py).
"""

import logging
import math
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from elastic.protocol import wire
from elastic.protocol.layout import BlockSets
from elastic.protocol.messages import peer
from elastic.protocol.messages.direction import header_of, pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.peer import (
    FROM_FOLLOWER,
    TO_FOLLOWER,
    Lags,
    State,
    TensorShapes,
    ToFollower,
    Wanted,
)
from elastic.protocol.step_record import KnownSteps
from workers.distributed.admission import Admission
from workers.distributed.keepalive import watch_host
from workers.parallel.ahead import PartAhead
from workers.tensors.local import as_bytes
from workers.train_state.out_of_memory import says_no_memory
from workers.train_state.snapshot import HostMemory, Snapshot
from workers.train_state.train_state import Update

log = logging.getLogger(__name__)
Tensors = Mapping[str, torch.Tensor]
NOTHING_KNOWN = KnownSteps((), None)
MAX_QUEUED_BYTES = 2**30
"""Of updates that a follower has not been sent: one that is further behind lags."""


def describe(shapes: Mapping[str, tuple[torch.dtype, torch.Size]]) -> TensorShapes:
    return tuple((n, str(d).removeprefix("torch."), tuple(s)) for n, (d, s) in shapes.items())


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a follower begins with, or anew."""

    snapshot: Snapshot
    records: KnownSteps
    """What is known of its last steps."""


def message_of(update: Update, records: KnownSteps) -> tuple[peer.Update, dict[str, torch.Tensor]]:
    """For followers, with the tensors themselves. records: what is known of the step."""
    message = peer.Update(
        step=update.step,
        is_finite=update.is_finite,
        divisor=update.divisor,
        num_microbatches=update.num_microbatches,
        log_names=update.log_names,
        records=records,
        origin=update.origin,
    )
    kinds = {
        "gradient": update.gradients,
        "buffer": update.buffers,
        "integer": update.integers,
        "square": update.squares,
    }
    return message, {f"{kind}/{n}": t for kind, of in kinds.items() for n, t in of.items()}


def update_of(
    said: peer.Update, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> Update:
    """The inverse of `message_of`, on a follower."""
    found: dict[str, dict[str, torch.Tensor]] = {
        kind: {} for kind in ("gradient", "buffer", "integer", "square")
    }
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        found[kind][name] = tensor.to(device)
    return Update(
        step=said.step,
        is_finite=said.is_finite,
        divisor=said.divisor,
        num_microbatches=said.num_microbatches,
        gradients=found["gradient"],
        buffers=found["buffer"],
        integers=found["integer"],
        log_names=said.log_names,
        origin=said.origin,
        squares=found["square"],
    )


def size_of(tensors: Tensors) -> int:
    """Bytes."""
    return sum(t.nbytes for t in tensors.values())


def send_update(connection: socket.socket, message: peer.Update | Lags, tensors: Tensors) -> None:
    """tensors: contiguous, on the host."""
    described = describe({n: (t.dtype, t.shape) for n, t in tensors.items()})
    chunks = [as_bytes(t) for t in tensors.values() if t.numel()]
    wire.send(connection, header_of(replace(message, tensors=described)), chunks)


def send_state(connection: socket.socket, start: Start, queued: int) -> None:
    """Tensor by tensor, each copied just before it is sent."""
    snapshot, shapes = start.snapshot, start.snapshot.shapes
    message = State(snapshot.header, start.records, queued, describe(shapes))
    wire.send_header(connection, header_of(message), snapshot.size_bytes)
    for name, (_, shape) in shapes.items():
        tensor = snapshot.take(name)
        if shape.numel():
            connection.sendall(as_bytes(tensor))


def receive_tensors(
    connection: socket.socket, memory: HostMemory, on_tensor: Callable[[], None]
) -> tuple[ToFollower, dict[str, torch.Tensor]]:
    message = TO_FOLLOWER.read(wire.receive_header(connection)[0])
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in message.tensors:
        tensors[name] = memory.take(name, getattr(torch, dtype), torch.Size(shape))
        if tensors[name].numel():
            wire.receive_into(connection, as_bytes(tensors[name]))
        on_tensor()
    return message, tensors


class Follower:
    """A newcomer that this worker feeds. The main thread offers, a thread sends."""

    def __init__(
        self, connection: socket.socket, worker: int, blocks: BlockSets | None = None
    ) -> None:
        """blocks: as in `Wanted`; None: all of the state."""
        self.worker, self.blocks = worker, blocks
        self.is_lost = self.is_lagging = False
        self._connection = connection
        self._snapshot: Snapshot | None = None
        self._memory = HostMemory()
        self._queue: queue.SimpleQueue[Start | tuple[peer.Update | Lags, Snapshot] | None] = (
            queue.SimpleQueue()
        )
        self._queued_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._send, name=f"follower-{worker}", daemon=True).start()

    def begin(self, start: Start) -> None:
        self._snapshot, self.is_lagging = start.snapshot, False
        self._queue.put(start)

    def offer(self, update: peer.Update, tensors: Tensors) -> None:
        """Queue a copy of an update, unless it lags."""
        if self._queued_bytes > MAX_QUEUED_BYTES and not self.is_lagging:
            self._lag()
        if not (self.is_lost or self.is_lagging):
            copies = Snapshot({}, tensors, self._memory)
            try:
                copies.settle()
            except (MemoryError, RuntimeError) as error:
                if not says_no_memory(error):
                    raise
                self.close()
                return
            with self._lock:
                self._queued_bytes += copies.size_bytes
            self._queue.put((update, copies))

    def _lag(self) -> None:
        """What waits to be sent will be part of the state that it gets."""
        self.is_lagging = True
        log.warning(
            'newcomer=%d lags reason="its link carries less than the steps bring" '
            'later="it gets the state anew when it is let in, and the others wait for that"',
            self.worker,
        )
        kept: list[Start | None] = []
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, tuple):
                    self._give_back(item[1].taken())
                else:
                    kept.append(item)
        for item in kept:
            self._queue.put(item)
        self._queue.put((Lags(), Snapshot({}, {})))

    def _give_back(self, copies: Tensors) -> None:
        """Memory for the next updates."""
        self._memory.give(copies)
        with self._lock:
            self._queued_bytes -= size_of(copies)

    def end(self) -> None:
        """Nothing follows what is queued."""
        self._queue.put(None)

    def close(self) -> None:
        self.is_lost = True
        self._queue.put(None)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # the thread may be in the middle of a send

    def _send(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, Start):
                    send_state(self._connection, item, self._queue.qsize())
                    continue
                message, tensors = item[0], item[1].taken()
                message = replace(message, queued=self._queue.qsize())
                send_update(self._connection, message, tensors)
                self._give_back(tensors)
        except ConnectionError:  # it has come in, follows another one, or is lost
            log.info("newcomer=%d takes no more", self.worker)
            self.is_lost = True
        except (OSError, MemoryError, RuntimeError) as error:
            log.warning('newcomer=%d is fed no more reason="%s"', self.worker, error)
            self.is_lost = True
        if self._snapshot is not None:
            self._snapshot.drop()
        self._connection.close()


class PeerServer:
    """Accepts newcomers; the main thread takes them on at its next step boundary."""

    def __init__(
        self, host: str, token: str, wake: Callable[[], None], detect_s: float | None
    ) -> None:
        self._detect_s = detect_s
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(None)  # a user's module may have set another default
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._wake = wake
        self._arrived: queue.SimpleQueue[Follower] = queue.SimpleQueue()
        Admission(self._listener, token, self._take, "peer server")

    def _take(self, connection: socket.socket, hello: Hello) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_host(connection, self._detect_s, is_sender=True)
            blocks: BlockSets | None = None
            if hello.role == "part":
                connection.settimeout(wire.HELLO_S)  # it says so at once, or never
                blocks = FROM_FOLLOWER.read(*wire.receive(connection)).blocks
                connection.settimeout(None)
            self._arrived.put(Follower(connection, int(hello.worker), blocks))
            self._wake()
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()

    def arrived(self) -> list[Follower]:
        """Newcomers since the last call."""
        found: list[Follower] = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found


class Followers:
    """Those that a member feeds."""

    def __init__(
        self, server: PeerServer, whole: Callable[[], Start], ahead: PartAhead | None = None
    ) -> None:
        """whole: all of the state, if this worker has it, and what is known of its last steps.
        ahead: of a state in parts."""
        self._server, self._whole, self._ahead = server, whole, ahead
        self._all: list[Follower] = []

    def take_on(self) -> None:
        """Whoever has arrived begins with the state, or what it wants of it; who wants what this
        worker cannot give is told by the end of the connection."""
        for follower in self._server.arrived():
            start = self._start(follower.blocks)
            if start is None:
                follower.close()
            else:
                follower.begin(start)
                self._all.append(follower)

    def _start(self, blocks: BlockSets | None) -> Start | None:
        if blocks is None:
            return self._whole()
        snapshot = None if self._ahead is None else self._ahead.snapshot(blocks)
        return None if snapshot is None else Start(snapshot, NOTHING_KNOWN)

    def renew(self) -> None:
        """A generation forms: whoever lags gets the state as it is now."""
        for follower in self._all:
            if follower.is_lagging and not follower.is_lost:
                follower.begin(self._whole())

    def offer(self, update: Update, records: Callable[[], KnownSteps]) -> None:
        """A committed step, before it is applied. records: what is known of it, asked for if there
        is anybody to take it."""
        self._all = [f for f in self._all if not f.is_lost]
        whole = [f for f in self._all if f.blocks is None]
        if whole:
            message, tensors = message_of(update, records())
            for follower in whole:
                follower.offer(message, tensors)
        for follower in self._all:
            if follower.blocks is not None and self._ahead is not None:
                part = self._ahead.update(update, follower.blocks)
                follower.offer(*message_of(part, NOTHING_KNOWN))

    def end_parts(self) -> None:
        """A generation forms, in which this worker may hold other blocks."""
        for follower in self._all:
            if follower.blocks is not None:
                follower.end()
        self._all = [f for f in self._all if f.blocks is None]


class Following:
    """This worker's connection to its source; a thread receives, the main thread applies."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str,
        worker: int,
        timeout_s: float,
        detect_s: float | None,
        wake: Callable[[], object],
        blocks: BlockSets | None = None,
        max_unused_bytes: float = math.inf,
    ) -> None:
        """blocks: of a source that has a part of the state, the tensors that are wanted.
        max_unused_bytes: of updates that were received and are not used; if several are more, no
        others are received."""
        self.received: queue.SimpleQueue[tuple[ToFollower, dict[str, torch.Tensor]]] = (
            queue.SimpleQueue()
        )
        self.arrived = threading.Event()
        """Set whenever there is news; the reader clears it."""
        self.memory = HostMemory()
        """Where updates that were applied may be given back."""
        self.failure = ""
        """Why nothing more will come; empty while it may."""
        self.shortage: Exception | None = None
        """There is no memory for what came."""
        self.num_tensors = 0
        """Received so far, of what is not whole yet as well."""
        self.is_full = False
        """It receives no more, since nobody uses what it has received."""
        self._num_unused = self._unused_bytes = 0
        self._max_unused_bytes, self._lock = max_unused_bytes, threading.Lock()
        self._wake = wake
        self._connection = socket.create_connection(address, timeout=timeout_s)
        self._connection.settimeout(None)  # a source between steps is silent; its loss closes,
        watch_host(self._connection, detect_s, is_sender=False)  # unless the link is cut
        role = "" if blocks is None else "part"
        self._connection.sendall(pack(Hello(token, worker, role)))
        if blocks is not None:
            self._connection.sendall(pack(Wanted(blocks)))
        threading.Thread(target=self._receive, name="following", daemon=True).start()

    def _receive(self) -> None:
        try:
            while self._has_room:
                said, tensors = receive_tensors(self._connection, self.memory, self._count)
                self._count_unused(said, tensors, 1)
                self.received.put((said, tensors))
                self.arrived.set()
                self._wake()
            self.is_full = True
            self._end("it has sent more steps than can be kept until other sources have")
            self.close()
        except (OSError, ValueError) as error:
            self._end(f"the source closed the connection: {error}")
        except (MemoryError, RuntimeError) as error:
            self.shortage = error
            self._end(f"what came cannot be kept: {error}")

    def _count(self) -> None:
        self.num_tensors += 1

    @property
    def _has_room(self) -> bool:
        return self._num_unused < 2 or self._unused_bytes <= self._max_unused_bytes

    def _count_unused(self, said: ToFollower, tensors: Tensors, sign: int) -> None:
        if isinstance(said, peer.Update):
            with self._lock:
                self._num_unused += sign
                self._unused_bytes += sign * size_of(tensors)

    def use(self, said: ToFollower, tensors: Tensors) -> None:
        """These, of what was received, wait for nothing any more."""
        self._count_unused(said, tensors, -1)

    def _end(self, why: str) -> None:
        self.failure = why
        self.arrived.set()
        self._wake()

    def close(self) -> None:
        """Stop following; what was received stays."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.failure = self.failure or "closed"
        self._connection.close()
