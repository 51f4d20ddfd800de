"""What runs inside a loader process: it builds the dataset and loads samples, one at a time.

The worker's side is loader.py, the messages are loader_frames.py.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from elastic.protocol.errors import UserError, in_words
from workers.data import loader_frames as frames
from workers.data.order import SampleOrder
from workers.data.parquet_source import fed_source, is_rays_own
from workers.step.randomness import seed_dataset, seed_microbatch, seed_sample

_PR_SET_PDEATHSIG = 1
_AHEAD = 4  # loaded micro-batches that may wait for the worker, per process
_COMMAND_CHECK_S = 0.001


def run(connection: socket.socket, workload: Any, plan: frames.Plan, parent: int) -> None:
    """The life of a loader process, until its parent kills it or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    gc.freeze()  # garbage of the worker's: to end a group of it, or a device's event, fails here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the run through the worker
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    seed_dataset(plan.seed)
    plan.enter_child()
    found = _dataset(connection, workload)
    if found is None:
        return
    with torch.inference_mode(False):
        _LoaderProcess(connection, workload, *found, plan).serve()


def _dataset(connection: socket.socket, workload: Any) -> tuple[Any, int] | None:
    """What is loaded here and its length; None if the worker has been told that nothing is."""
    what, num_rows = "dataset() raised", 0
    try:
        dataset = workload.dataset()
        what = "what dataset() returned cannot be passed on to the feed:"
        source = fed_source(dataset)
        what = "the length of what dataset() returned:"
        refusal = None if source is not None else _refusal(dataset)
        if source is None and refusal is None:
            num_rows = len(dataset)
    except BaseException as error:  # also sys.exit: an end without a word would look like a loss
        if what == "dataset() raised" and is_rays_own(error):
            frames.send(connection, frames.FED, b"")
            return None
        failure = f"{what} {in_words(error)}", traceback.format_exc()
        frames.send(connection, frames.FAILED, failure)
        return None
    if source is not None:
        frames.send(connection, frames.FED, source)
    elif refusal:
        frames.send(connection, frames.REFUSED, refusal)
    else:
        frames.send(connection, frames.READY, num_rows)
        return dataset, num_rows
    return None


def _refusal(dataset: Any) -> str | None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return (
            f"dataset() returned a {kind}, an IterableDataset: its order depends on who iterates "
            "it, and it cannot go on at a given sample; return a map-style dataset, "
            "elastic.data.parquet(...) or a ray.data.Dataset"
        )
    if isinstance(dataset, str | bytes | PathLike):
        return (
            f"dataset() returned {dataset!r}, a {kind}: for the Parquet files there return "
            f"elastic.data.parquet({dataset!r})"
        )
    if isinstance(dataset, list | tuple) and any(map(_is_parquet, dataset[:1])):
        return (
            f"dataset() returned a {kind} of paths, which are no samples: return "
            "elastic.data.parquet(...) of it"
        )
    if isinstance(dataset, tuple) and dataset and _are_tensors(dataset):
        return (
            f"dataset() returned a tuple of {len(dataset)} tensors, which would be "
            f"{len(dataset)} samples; return torch.utils.data.TensorDataset(*tensors)"
        )
    if isinstance(dataset, Mapping):
        return (
            f"dataset() returned a {kind}, whose keys are no positions; return one of its values "
            "(a split), or a list of them"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return (
            f"dataset() returned a {kind}, which has no __len__ or no __getitem__; "
            "return a map-style dataset, elastic.data.parquet(...) or a ray.data.Dataset"
        )
    return None if len(dataset) else f"dataset() returned a {kind} of length 0; there is no sample"


def _are_tensors(samples: tuple[Any, ...]) -> bool:
    return all(isinstance(sample, torch.Tensor) for sample in samples)


def _is_parquet(sample: Any) -> bool:
    return isinstance(sample, str | PathLike) and str(sample).endswith(".parquet")


class _Superseded(Exception):
    """Another assignment arrived while a micro-batch was being loaded."""


class _LoaderProcess:
    def __init__(
        self,
        connection: socket.socket,
        workload: Any,
        dataset: Any,
        num_rows: int,
        plan: frames.Plan,
    ) -> None:
        self._connection, self._dataset, self._plan = connection, dataset, plan
        self._collate = getattr(workload, "collate", None) or default_collate
        self._order = SampleOrder(num_rows, plan.seed)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._assignment = frames.Assignment(0, 0, range(0), 1)
        self._next = 0  # position in the assignment's sequence of micro-batches
        self._num_waiting = 0
        self._rows_step = -1
        self._rows = np.empty(0, np.int64)
        self._checked_at = time.monotonic()

    def serve(self) -> None:
        while True:
            may_load = self._num_waiting < _AHEAD and self._has_more()
            if self._poll.poll(0 if may_load else None):
                self._take_command()
            elif may_load:
                self._load_next()

    def _take_command(self) -> None:
        command = self._connection.recv(64)
        if not command:
            raise SystemExit  # the worker has closed its end
        if command == frames.TAKEN:
            self._num_waiting -= 1
        else:
            self._assignment = frames.read_assignment(command)
            self._next, self._num_waiting, self._rows_step = self._plan.index, 0, -1

    def _check_commands(self) -> None:
        """Between samples, at most every millisecond: slow samples must not delay a regroup."""
        now = time.monotonic()
        if now - self._checked_at > _COMMAND_CHECK_S:
            self._checked_at = now
            number = self._assignment.number
            while self._poll.poll(0):
                self._take_command()
            if self._assignment.number != number:
                raise _Superseded

    def _has_more(self) -> bool:
        ids, num_steps = self._assignment.ids, self._assignment.num_steps
        return bool(ids) and (not num_steps or self._next < num_steps * len(ids))

    def _load_next(self) -> None:
        ids, number = self._assignment.ids, self._assignment.number
        steps, place = divmod(self._next, len(ids))
        step, microbatch_id = self._assignment.step + steps, ids[place]
        where = {"assignment": number, "step": step, "microbatch_id": microbatch_id}
        try:
            parts = self._load(step, microbatch_id)
        except _Superseded:
            return
        except UserError as error:
            frames.send(
                self._connection, frames.RAISED, (error.message, error.traceback_text), **where
            )
        else:
            frames.send_parts(self._connection, frames.LOADED, parts, **where)
        self._next += self._plan.num_processes
        self._num_waiting += 1

    def _load(self, step: int, microbatch_id: int) -> list[memoryview]:
        """The rows and the batch, pickled. UserError for whatever the user's code raises: an end of
        this process without a word would look like a loss, again and again at the same row."""
        plan = self._plan
        rows = self._rows_of(step, microbatch_id)
        first = step * plan.global_batch + microbatch_id * plan.micro_batch
        where = f"step {step + 1}, micro-batch {microbatch_id}"
        samples: list[Any] = []
        for position, row in enumerate(rows.tolist(), first):
            self._check_commands()
            seed_sample(plan.seed, position)
            try:
                samples.append(self._dataset[row])
            except BaseException as error:
                what = f"loading the sample at stream position {position} (row {row}, {where})"
                raise _user_error(error, what) from None
        seed_microbatch(plan.seed, step, microbatch_id)
        what = "collating the samples"
        try:
            batch = self._collate(samples)
            what = "passing to the worker the batch of the samples"
            return frames.pickled((rows, batch))
        except BaseException as error:
            positions = f"stream positions {first}..{first + len(rows) - 1}"
            what += f" at {positions} (rows {rows.tolist()}, {where})"
            raise _user_error(error, what) from None

    def _rows_of(self, step: int, microbatch_id: int) -> np.ndarray:
        """A step's rows are computed at once: micro-batch by micro-batch it costs more."""
        ids, size = self._assignment.ids, self._plan.micro_batch
        if step != self._rows_step:
            first = step * self._plan.global_batch
            if ids.step == 1:
                self._rows = self._order.rows(first + ids.start * size, len(ids) * size)
            else:
                self._rows = np.concatenate([self._order.rows(first + i * size, size) for i in ids])
            self._rows_step = step
        at = ids.index(microbatch_id) * size
        return self._rows[at : at + size]


def _user_error(error: BaseException, what: str) -> UserError:
    return UserError(f"{in_words(error)}, {what}", traceback.format_exc())
