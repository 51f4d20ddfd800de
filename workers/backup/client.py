"""A rank's side of peer memory: its shard, as of the last steps, on the host and in a holder.

After a step the shard is copied while the next step computes (its *own copy*), then pushed to a
holder on another failure domain, both in a thread. What is read back, and when, is
resharding/assemble.py's.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from elastic.protocol import wire
from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.layout import BlockSets
from elastic.protocol.messages import to_controller
from elastic.protocol.messages.backup import (
    FROM_BACKUP,
    Held,
    Ping,
    Push,
    Refused,
    Settle,
    Sums,
    Unshared,
)
from elastic.protocol.messages.direction import header_of, pack
from elastic.protocol.messages.to_controller import HolderSilent, Protected, Report
from elastic.protocol.timeouts import timeouts_of
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.copy import BackupCopy, bytes_of, is_older
from workers.backup.server import CHECKED_BYTES_S, ask, connect
from workers.backup.shared import SharedArena
from workers.backup.store import Key
from workers.train_state.out_of_memory import OutOfMemory, says_no_memory
from workers.train_state.owner import StateOwner
from workers.train_state.train_state import TrainState

log = logging.getLogger(__name__)
CONNECT_S = 2.0
MIN_SILENCE_S = 5.0
"""For a piece of a copy over a slow network."""
COPY_S = 5.0
"""How long a regroup waits for a copy on the host that is being made."""
PIECE_BYTES = 8 * 2**20
RETRY_S = 2.0
"""A holder that failed is not tried again for so long, and then only if it answers at once."""
ANSWER_S = 0.25
_POLL_S = 0.02


class Failure(NamedTuple):
    """What became of the last push to a holder."""

    at: float
    why: str


class Begun(NamedTuple):
    """The generation at hand."""

    generation: int = 0
    doubled: BlockSets = ()
    """Tensors of these blocks live on two nodes, and need no holder."""
    carried: int = -1
    """The generation before, whose copies of the state it began with are all held."""


class Job(NamedTuple):
    """For the client's thread."""

    copy: BackupCopy
    settled: tuple[int, int] | None
    """Generation and step of which all copies are held."""
    is_whole: bool = False
    """What lives on two nodes is to be held, too."""


class BackupClient:
    """The main thread keeps and waits; a thread copies and pushes."""

    def __init__(self, spec: WorkerSpec, send: Callable[[Report], None]) -> None:
        """send: reports to the controller."""
        self._spec, self._send = spec, send
        self.own_copies: list[BackupCopy] = []
        """Oldest first: the last one may not be held yet, by it or by others."""
        self.holders: tuple[BackupAddress, ...] = ()
        """The best first."""
        self._silence_s = max(MIN_SILENCE_S, timeouts_of(spec.detect_s).confirm_s)
        """So long a holder may be silent: until then the controller has replaced a frozen one."""
        self._failed: dict[BackupAddress, Failure] = {}
        self._is_bare = False
        """The controller has been told that no holder has this rank's newest copy."""
        self._arenas: list[SharedArena] = []
        self._lent: list[BackupCopy] = []
        """What a holder of this node may still read."""
        self._can_share = True
        self._begun = Begun()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._num_open = 0  # jobs that the thread has not finished
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._connected_to: BackupAddress | None = None
        self._sending: socket.socket | None = None
        """The connection while a copy is on its way."""
        self._settled = 0
        """The last generation whose holders know that all its first copies are held."""
        threading.Thread(target=self._work, name="backup", daemon=True).start()

    @property
    def delays_commits(self) -> bool:
        """A step is on record only once all its shards are held."""
        return self._spec.snapshot_every == 1

    # --- main thread -------------------------------------------------------------------
    def begin(
        self,
        train_state: TrainState,
        origin: int,
        by: StateOwner,
        *,
        is_held: bool = False,
        doubled: BlockSets = (),
    ) -> None:
        """A generation has formed: all its shards are to be held, and older ones kept until then.

        origin: the generation that computed the step it begins with. is_held: holders have all of
        that state, cut as it was before, which will do until the first step's copies are held.
        doubled: tensors of these blocks live on two nodes, and need no holder.
        """
        self._begun = Begun(by.generation, doubled)
        sending = self._sending
        if sending is not None:
            with suppress(OSError):  # nobody needs what is still on its way
                sending.shutdown(socket.SHUT_RDWR)
        same = [c for c in self.own_copies if (c.origin, c.key.step) == (origin, train_state.step)]
        if is_held:
            self._let_go(same[-1:])
            carried = same[-1].key.generation if same else -1
            self._begun = self._begun._replace(carried=carried)
        else:
            self._keep(same[-1:], train_state, origin, by, None)

    def after_step(self, train_state: TrainState, by: StateOwner) -> None:
        """A step was voted for; `wait` has been called before, so all hold the last copy."""
        last = self.own_copies[-1:]
        since = self._since(by)
        if train_state.step % self._spec.snapshot_every == 0:
            self._keep(last, train_state, by.generation, by, since)
        elif since is not None and self._settled < by.generation:
            self._ask(last[0], since)  # else holders would keep the copies of every generation
            self._settled = by.generation

    def before_pause(self, train_state: TrainState, by: StateOwner) -> None:
        """Whoever leaves at this boundary takes nothing along: all of it is to be held, for both
        nodes where something lives may be left."""
        last, doubled = self.own_copies[-1:], self._begun.doubled
        self._begun = self._begun._replace(doubled=())
        if last and last[0].key.step < train_state.step:
            self._keep(last, train_state, by.generation, by, self._since(by))
        elif last and doubled:
            self._ask(last[0], None, is_whole=True)

    def _since(self, by: StateOwner) -> tuple[int, int] | None:
        """The last copy, if it is of this generation: all ranks' are held."""
        last = self.own_copies[-1].key if self.own_copies else None
        is_of_this = last is not None and last.generation == by.generation
        return (last.generation, last.step) if is_of_this and last is not None else None

    def _keep(
        self,
        kept: list[BackupCopy],
        train_state: TrainState,
        origin: int,
        by: StateOwner,
        settled: tuple[int, int] | None,
    ) -> None:
        self._let_go(kept)
        with self._changed:
            arena = self._arenas.pop() if self._arenas else None
            arena = arena or SharedArena(is_pinned=self._spec.device == "cuda")
        arena.give({})
        key = Key(by.generation, by.position.rank, train_state.step)
        copy = BackupCopy(key, origin, by, train_state, arena, self._begun.doubled)
        self.own_copies.append(copy)
        self._ask(copy, settled)

    def _ask(
        self, copy: BackupCopy, settled: tuple[int, int] | None, *, is_whole: bool = False
    ) -> None:
        with self._changed:
            self._num_open += 1
            copy.num_jobs += 1
        self._jobs.put(Job(copy, settled, is_whole))

    def _let_go(self, kept: list[BackupCopy]) -> None:
        with self._changed:  # what is still being sent keeps its memory
            idle = [c for c in self.own_copies if c not in kept and not c.num_jobs]
            self.own_copies = list(kept)
            self._lent += [c for c in idle if c.shared_with is not None]
            self._arenas += [c.arena for c in idle if c.shared_with is None]

    def _take_back(self, holder: BackupAddress, settled: tuple[int, int] | None) -> None:
        """What was lent is free once its holder has let go of it, or another one is in charge."""
        with self._changed:
            still = [c for c in self._lent if c.shared_with == holder and not is_older(c, settled)]
            self._arenas += [c.arena for c in self._lent if c not in still]
            self._lent = still

    def finished(self) -> list[BackupCopy]:
        """Those that are whole on the host, the newest first."""
        return [c for c in reversed(self.own_copies) if c.finish(COPY_S)]

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until the last copy is held, there is no holder, or is_over(). It ends: a holder that
        is silent for too long counts as lost. OutOfMemory if there is none for the copy,
        RuntimeError if it cannot be made."""
        with self._changed:
            while self._num_open and not is_over() and self._error is None:
                self._changed.wait(_POLL_S)
        if self._error is not None:
            if says_no_memory(self._error):
                raise OutOfMemory("out of memory while it copied its shard") from self._error
            raise RuntimeError("this rank's shard could not be copied") from self._error

    def forget(self) -> None:
        """The run goes back to a checkpoint: what was kept is of no use."""
        self._begun = Begun(-1)
        self._let_go([])

    # --- link's thread -------------------------------------------------------------------
    def hear(self, holders: Sequence[tuple[str, str, int]]) -> None:
        """Where this rank's copies may go, the best first. A holder that is not among them is
        lost: what it held goes to another."""
        self.holders = tuple(BackupAddress(*h) for h in holders)
        sending = self._sending
        if sending is not None and self._connected_to not in self.holders:
            with suppress(OSError):  # it may never answer
                sending.shutdown(socket.SHUT_RDWR)
        with self._changed:
            newest = self.own_copies[-1:]
            if newest and newest[0].held_by not in self.holders:
                newest[0].held_by = None
                self._ask(newest[0], None)

    # --- client's thread -----------------------------------------------------------------
    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                self._protect(job)
            except Exception as error:  # whatever it is, the main thread raises it
                self._error = error
            with self._changed:
                self._num_open -= 1
                job.copy.num_jobs -= 1
                self._changed.notify_all()

    def _protect(self, job: Job) -> None:
        copy, settled, is_whole = job
        if not copy.tensors:
            copy.make()
        if is_whole and copy.lacks:
            copy.lacks, copy.held_by = (), None
        if copy.held_by not in self.holders:
            copy.held_by = self._push(copy, settled)
            self._tell_of(copy)
        elif settled is not None and self._connected_to == copy.held_by:
            self._settle(settled)
        if copy.key.generation == self._begun.generation and self.delays_commits:
            generation, rank, step = copy.key
            self._send(to_controller.Held(generation, rank, step))

    def _tell_of(self, copy: BackupCopy) -> None:
        """Whenever nobody holds it; and when that is over."""
        if not self._is_wanted(copy) or (copy.is_held and not self._is_bare):
            return
        failed = [f"{h.host}:{h.port}: {self._failed[h].why}" for h in self._failed]
        why = "" if copy.is_held else "; ".join(failed) or "there is no holder"
        self._is_bare = not copy.is_held
        self._send(Protected(copy.key.step, why))

    def _push(self, copy: BackupCopy, settled: tuple[int, int] | None) -> BackupAddress | None:
        """To the best holder that takes it. None if none does: the rank is not protected."""
        push = Push(
            key=copy.key,
            origin=copy.origin,
            world_size=copy.at.mesh.world_size,
            cuts=copy.at.mesh.cuts,
            state=copy.state,
            slices=copy.slices(),
            settled=settled,
            lacks=copy.lacks,
        )
        self._failed = {h: failure for h, failure in self._failed.items() if h in self.holders}
        for holder in self.holders:
            if not self._is_wanted(copy):
                return None
            if not self._is_worth_trying(holder):
                continue
            try:
                self._send_copy(holder, push, copy)
                self._take_back(holder, settled)
                return holder
            except (OSError, ValueError) as error:
                self._close()
                if self._is_wanted(copy) and holder in self.holders:
                    self._failed[holder] = Failure(time.monotonic(), str(error))
                    log.warning('holder=%s:%d lost reason="%s"', *holder[1:], error)
                    if isinstance(error, TimeoutError):
                        self._send(HolderSilent(holder))
        return None

    def _is_worth_trying(self, holder: BackupAddress) -> bool:
        """Nobody waits long for a second time for one that is frozen."""
        failure = self._failed.get(holder)
        if failure is None:
            return True
        if time.monotonic() - failure.at < RETRY_S:
            return False
        try:
            with connect(holder[1:], self._spec.token, ANSWER_S) as connection:
                ask(connection, Ping())
        except OSError as error:
            self._failed[holder] = Failure(time.monotonic(), str(error))
            return False
        del self._failed[holder]
        return True

    def _is_wanted(self, copy: BackupCopy) -> bool:
        return copy.key.generation in (self._begun.generation, self._begun.carried)

    def _settle(self, settled: tuple[int, int]) -> None:
        assert self._connection is not None
        try:
            self._connection.sendall(pack(Settle(settled)))
        except OSError:
            self._close()  # the next push finds out more

    def _send_copy(self, holder: BackupAddress, push: Push, copy: BackupCopy) -> None:
        """Raises OSError, ValueError."""
        if self._connection is not None and self._connected_to == holder:
            try:
                self._transfer(self._connection, holder, push, copy)
                return
            except ConnectionError:  # `begin` may have ended what went before, as `hear` may
                if not self._is_wanted(copy) or holder not in self.holders:
                    raise
        self._close()
        self._connection = connect(holder[1:], self._spec.token, CONNECT_S)
        self._connected_to = holder
        self._connection.settimeout(self._silence_s)
        self._transfer(self._connection, holder, push, copy)

    def _transfer(
        self,
        connection: socket.socket,
        holder: BackupAddress,
        push: Push,
        copy: BackupCopy,
    ) -> None:
        self._sending = connection
        try:
            self._transfer_whole(connection, holder, push, copy)
        finally:
            self._sending = None

    def _transfer_whole(
        self,
        connection: socket.socket,
        holder: BackupAddress,
        push: Push,
        copy: BackupCopy,
    ) -> None:
        is_near = self._can_share and holder.node == self._spec.node
        tensors = {piece.layout.name: copy.tensors[piece.layout.name] for piece in push.slices}
        shared = copy.arena.describe(tensors) if is_near else None
        copy.shared_with = None if shared is None else holder
        size_bytes = sum(t.nbytes for t in tensors.values()) if shared is None else 0
        wire.send_header(connection, header_of(replace(push, shared=shared)), size_bytes)
        for view in map(bytes_of, tensors.values() if shared is None else ()):
            for first in range(0, len(view), PIECE_BYTES):  # each in time, whatever their sum
                connection.sendall(view[first : first + PIECE_BYTES])
        connection.sendall(pack(Sums(tuple(copy.sums[name] for name in tensors))))
        connection.settimeout(self._silence_s + size_bytes / CHECKED_BYTES_S)
        answer = FROM_BACKUP.read(*wire.receive(connection))
        connection.settimeout(self._silence_s)
        if isinstance(answer, Unshared):
            log.warning(
                'holder=%s:%d reads no shared memory reason="%s"', *holder[1:], answer.reason
            )
            self._can_share = False
            self._transfer_whole(connection, holder, push, copy)
        elif not isinstance(answer, Held):
            raise ValueError(answer.reason if isinstance(answer, Refused) else f"{answer!r:.100}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._connected_to = None
