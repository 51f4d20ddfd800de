"""The loader: micro-batches of a map-style dataset, loaded ahead by forked processes.

Processes and never threads, because samples are seeded through global generators. What a step's
micro-batches are is fixed by order.py; which of them this worker computes is told by `assign`.
"""

import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, Protocol

import numpy as np

from elastic.protocol.errors import StepCancelled, UserError, WrongInput
from workers.data import loader_frames as frames
from workers.data.loader_process import run

_POLL_S = 0.002
_ALIVE_CHECK_S = 0.1
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """One micro-batch: what `loss` receives, and the rows it was made of."""

    step: int
    microbatch_id: int
    rows: np.ndarray  # int64, (micro_batch,)
    batch: Any


class AnyLoader(Protocol):
    """Where a worker's micro-batches come from."""

    def assign(self, step: int, ids: range) -> None:
        """See Loader.assign."""
        ...

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        """See Loader.next."""
        ...

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        """See Loader.fetch."""
        ...


class LoaderLost(RuntimeError):
    """A loader process is gone; its worker cannot go on, another one can."""


class _Child:
    """One loader process and this side of its socket."""

    def __init__(self, process: BaseProcess, connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        self._checked_at = time.monotonic()

    def receive(self, is_cancelled: Callable[[], bool]) -> frames.Frame:
        """The next message, whatever it is; StepCancelled soon after is_cancelled turns true."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while not poll.poll(_POLL_S * 1e3):
            if is_cancelled():
                raise StepCancelled
            if time.monotonic() - self._checked_at > _ALIVE_CHECK_S:
                self._checked_at = time.monotonic()
                if not self.process.is_alive() and not poll.poll(0):
                    self._raise_lost()
        return self._received()

    def _received(self) -> frames.Frame:
        try:
            frame = frames.receive(self.connection)
        except ConnectionError:
            frame = None
        if frame is None:
            self._raise_lost()
        if frame.kind == frames.FAILED:
            message, traceback_text = frame.value()
            raise UserError(message, traceback_text)
        if frame.kind == frames.REFUSED:
            raise WrongInput(frame.value())
        return frame

    def drain(self) -> None:
        """Drop what has arrived for an assignment that is over."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        with suppress(ConnectionError):
            while poll.poll(0) and frames.receive(self.connection) is not None:
                pass

    def send(self, command: bytes) -> None:
        try:
            self.connection.send(command)
        except ConnectionError:
            self._raise_lost()

    def _raise_lost(self) -> NoReturn:
        self.process.join(_CLOSE_S)
        code = self.process.exitcode
        how = "still runs" if code is None else f"exited with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {_name(-code)}"
        if code == -signal.SIGKILL:
            how += " (without a sender it usually means out of memory)"
        raise LoaderLost(f"loader process {self.process.pid} {how}")


class Loader:
    """The loader processes of one worker.

    Make it in the main thread and early: the processes are forked, and they die with the thread
    that forked them, so with this process and never later. Each builds `workload.dataset()`.
    """

    def __init__(
        self,
        workload: Any,
        seed: int,
        global_batch: int,
        micro_batch: int,
        processes: int = 1,
        enter_child: Callable[[], None] = lambda: None,
    ) -> None:
        self._children: list[_Child] = []
        self._assignment = 0
        self._first_step, self._ids = 0, range(0)
        self._num_rows: int | None = None
        self._heard: list[frames.Frame] = []
        for index in range(processes):
            plan = frames.Plan(seed, global_batch, micro_batch, index, processes, enter_child)
            self._children.append(_fork(workload, plan))

    @property
    def num_rows(self) -> int:
        """The dataset's length. Waits for every process to build its dataset.

        UserError if `dataset()` raises, WrongInput if it cannot be used.
        """
        if self._num_rows is None:
            counts = [frame.value() for frame in self._first_words()]
            if len(set(counts)) > 1:
                raise WrongInput(
                    f"dataset() has another length in each process: {counts}; it must be the same "
                    "data everywhere"
                )
            self._num_rows = int(counts[0])
        return self._num_rows

    def source(self) -> bytes | None:
        """None for a map-style dataset. Else the pickled source, and this loader has no part in
        the run (empty: `dataset()` must be called where Ray can be used). Raises as num_rows does.
        """
        first, *_ = self._first_words()
        if first.kind == frames.FED:
            return first.value()
        assert self.num_rows
        return None

    def _first_words(self) -> list[frames.Frame]:
        if not self._heard:
            self._heard = [child.receive(lambda: False) for child in self._children]
        return self._heard

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.process.pid or 0 for child in self._children)

    def assign(self, step: int, ids: range) -> None:
        """Load `ids` of step, step + 1, ... ahead; what was assigned before is forgotten."""
        self._assign(step, ids, num_steps=0)

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        """One micro-batch of the assignment, in its order (going back needs a new `assign`).

        StepCancelled within milliseconds of is_cancelled turning true; UserError if the user's
        code raised for this micro-batch; LoaderLost if the loader process is gone.
        """
        assert microbatch_id in self._ids, f"{microbatch_id} is not assigned: {self._ids}"
        if is_cancelled():
            raise StepCancelled
        index = (step - self._first_step) * len(self._ids) + self._ids.index(microbatch_id)
        child = self._children[index % len(self._children)]
        while True:
            frame = child.receive(is_cancelled)
            if frame.kind not in (frames.LOADED, frames.RAISED):
                continue
            if frame.assignment != self._assignment:
                continue
            child.send(frames.TAKEN)
            if (frame.step, frame.microbatch_id) == (step, microbatch_id):
                break
            assert (frame.step, frame.microbatch_id) < (step, microbatch_id), "going back"
        if frame.kind == frames.RAISED:
            message, traceback_text = frame.value()
            raise UserError(message, traceback_text)
        rows, batch = frame.value()
        return LoadedBatch(step, microbatch_id, rows, batch)

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        """Exactly one micro-batch, for a probe. Ends the current assignment."""
        self._assign(step, range(microbatch_id, microbatch_id + 1), num_steps=1)
        return self.next(step, microbatch_id, lambda: False)

    def close(self) -> None:
        for child in self._children:
            child.process.kill()
            child.connection.close()
        for child in self._children:
            child.process.join(_CLOSE_S)
        self._children = []

    def _assign(self, step: int, ids: range, num_steps: int) -> None:
        assert self.num_rows
        self._assignment += 1
        self._first_step, self._ids = step, ids
        command = frames.assign_command(self._assignment, step, ids, num_steps)
        for child in self._children:
            child.drain()  # before the command: what comes after it is wanted
            child.send(command)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _fork(workload: Any, plan: frames.Plan) -> _Child:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, frames.SOCKET_BYTES)
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(theirs, workload, plan, os.getpid()), name="loader", daemon=True
    )
    process.start()
    theirs.close()
    return _Child(process, ours)
