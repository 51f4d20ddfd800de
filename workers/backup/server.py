"""A holder: a process that keeps copies of trainers' shards and outlives the trainers.

It answers over our own TCP frames (elastic/protocol/wire.py): no pickle, and no torch, so that it
starts at once. What it keeps and drops is store.py's; who asks is client.py and
resharding/assemble.py.
"""

import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastic.protocol import wire
from elastic.protocol.layout import Box
from elastic.protocol.messages.backup import (
    FROM_BACKUP,
    TO_BACKUP,
    Boxes,
    Copies,
    CopyKey,
    Describe,
    Described,
    FromBackup,
    Have,
    Held,
    HeldCopy,
    Ping,
    Pong,
    Push,
    Question,
    Read,
    Refused,
    Settle,
    Shared,
    Sums,
    ToBackup,
    Unshared,
)
from elastic.protocol.messages.direction import header_of, pack
from elastic.protocol.messages.hello import Hello
from workers.backup.store import BackupStore, Copy, DamagedCopy, Key, Room, Stale, crc32
from workers.distributed.admission import Admission

log = logging.getLogger(__name__)
CHECKED_BYTES_S = 5e8
"""At least so fast a holder checks a copy, before it answers."""
_POLL_S = 0.5


class BackupServer:
    """Listens; a thread per connection."""

    def __init__(self, host: str, token: str) -> None:
        self.store = BackupStore()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._used_at = time.monotonic()
        self._admission = Admission(self._listener, token, self._serve, "holder")

    def wait_until_left(self, lease_s: float) -> None:
        """Return once nobody has been connected for `lease_s`."""
        while True:
            with self._lock:
                left_s = self._used_at + lease_s - time.monotonic()
                if self._open:
                    left_s = lease_s
            if left_s <= 0:
                return
            time.sleep(min(_POLL_S, left_s))

    def close(self) -> None:
        self._admission.close()
        for connection in tuple(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, _hello: Hello) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mapped: dict[int, memoryview] = {}
            while True:
                header, payload_bytes = wire.receive_header(connection)
                self._answer(connection, TO_BACKUP.read(header), payload_bytes, mapped)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # closed by the other side, or not one of ours
        finally:
            with self._lock:
                self._open.discard(connection)
                self._used_at = time.monotonic()
            connection.close()

    def _answer(
        self,
        connection: socket.socket,
        asked: ToBackup,
        payload_bytes: int,
        mapped: dict[int, memoryview],
    ) -> None:
        """mapped: what this trainer shares, by its serial number."""
        match asked:
            case Push():
                self._take(connection, asked, payload_bytes, mapped)
            case Settle(settled):
                with self._lock:
                    self.store.settle(*settled)
            case Ping():
                with self._lock:  # who cannot have it is of no use
                    generation = self.store.generation
                connection.sendall(pack(Pong(generation)))
            case Have():
                connection.sendall(pack(self._have()))
            case Describe(key):
                connection.sendall(pack(self._described(key)))
            case Read():
                self._read(connection, asked)
            case Sums():
                raise wire.BadFrame("sums of no copy")

    def _take(
        self,
        connection: socket.socket,
        push: Push,
        payload_bytes: int,
        mapped: dict[int, memoryview],
    ) -> None:
        shared, settled = push.shared, push.settled
        room: Room = bytearray()
        if shared is None:
            with self._lock:
                room = self.store.room(payload_bytes)
            wire.receive_into(connection, memoryview(room))
        sums = TO_BACKUP.read(*wire.receive(connection))
        if not isinstance(sums, Sums):
            raise wire.BadFrame("a copy without sums")
        try:
            content = map_shared(shared, mapped) if shared else room
            copy = Copy(
                key=Key(*push.key),
                origin=push.origin,
                world_size=push.world_size,
                state=push.state,
                slices=push.slices,
                content=content,
                sums=sums.sums,
                offsets=None if shared is None else shared.offsets,
                cuts=push.cuts,
                lacks=push.lacks,
            )
            if shared is None:  # else whoever reads it checks
                copy.check()  # not under the lock: somebody may ask what there is
            with self._lock:
                if settled is not None:
                    self.store.settle(*settled)
                self.store.put(copy)
        except OSError as error:
            connection.sendall(pack(Unshared(str(error))))
        except (DamagedCopy, Stale) as error:
            log.warning('copy=%s refused reason="%s"', list(push.key), error)
            connection.sendall(pack(Refused(str(error))))
        else:
            connection.sendall(pack(Held()))

    def _have(self) -> Copies:
        with self._lock:
            copies = self.store.copies()
        return Copies(
            tuple(
                HeldCopy(c.key, c.origin, c.world_size, c.size_bytes, c.cuts, c.lacks)
                for c in copies
            )
        )

    def _described(self, key: CopyKey) -> Described:
        copy = self._found(key)
        return Described(None, ()) if copy is None else Described(copy.state, copy.slices)

    def _found(self, key: CopyKey) -> Copy | None:
        with self._lock, suppress(LookupError):
            return self.store.copy(Key(*key))
        return None

    def _read(self, connection: socket.socket, asked: Read) -> None:
        copy = self._found(asked.key)
        try:
            if copy is None:
                raise LookupError("it is not held any more")
            copy.check({name for name, _ in asked.boxes})
            found = [copy.stretches(name, box) for name, box in asked.boxes]
        except (LookupError, DamagedCopy) as error:
            if isinstance(error, DamagedCopy):
                log.error('copy damaged reason="%s"', error)
                with self._lock:
                    self.store.remove(Key(*asked.key))
            connection.sendall(pack(Refused(str(error))))
            return
        said = Boxes(tuple(crc32(*stretches) for stretches in found))
        wire.send(connection, header_of(said), [each for of_box in found for each in of_box])


def map_shared(shared: Shared, mapped: dict[int, memoryview]) -> memoryview:
    """A trainer's memory, mapped once. OSError if it is not to be had here."""
    serial = shared.serial
    if serial not in mapped:
        file = os.open(shared.path, os.O_RDONLY)
        try:
            if os.fstat(file).st_ino != shared.inode:
                raise OSError(f"{shared.path} is another file here")
            area = mmap.mmap(file, shared.size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        mapped[serial] = memoryview(area)
    return mapped[serial]


def connect(address: tuple[str, int], token: str, timeout_s: float) -> socket.socket:
    """A connection to a holder. Raises OSError, TimeoutError for a holder that says nothing."""
    connection = socket.create_connection(address, timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(pack(Hello(token)))
    return connection


def ask(connection: socket.socket, question: Question) -> FromBackup:
    """Raises OSError."""
    connection.sendall(pack(question))
    return FROM_BACKUP.read(*wire.receive(connection))


def read_boxes(
    connection: socket.socket,
    key: Key,
    boxes: Sequence[tuple[str, Box]],
    into: Sequence[memoryview],
    begin_piece: Callable[[], None] = lambda: None,
) -> None:
    """Boxes of a copy's tensors into memory of their sizes. begin_piece: called before each; what
    it raises ends the reading. Raises OSError, LookupError and DamagedCopy."""
    begin_piece()
    connection.sendall(pack(Read(key, tuple(boxes))))
    header, size_bytes = wire.receive_header(connection)
    answer = FROM_BACKUP.read(header)
    if not isinstance(answer, Boxes):
        raise LookupError(answer.reason if isinstance(answer, Refused) else f"{answer!r:.100}")
    if size_bytes != sum(len(view) for view in into):
        raise LookupError(f"{size_bytes} bytes came")
    for view in into:
        begin_piece()
        wire.receive_into(connection, view)
    for (name, _), view, expected in zip(boxes, into, answer.sums, strict=True):
        if crc32(view) != expected:
            raise DamagedCopy(f"rank {key.rank}, step {key.step}: {name}, on its way")
