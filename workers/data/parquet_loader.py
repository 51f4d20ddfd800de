"""The loader of a fed run: this worker's micro-batches out of the windows that the feed reads.

It has loader.py's interface. A thread cuts micro-batches ahead (it draws no randomness: transforms
ran elsewhere, and a workload's own `collate` is called by `next`). Every worker holds the windows
at hand, so a regroup moves no data.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.protocol.errors import BadData, StepCancelled, UserError, WrongInput, in_words
from elastic.protocol.worker_spec import Feed, ParquetWindow
from workers.data.loader import LoadedBatch
from workers.data.parquet_batches import columns_of, samples_of
from workers.step.randomness import seed_microbatch

_POLL_S = 0.002
_CHECK_S = 0.05
_STALL_S = 0.5
"""After this long `next` says that it waits for the feed."""
_AHEAD = 4  # micro-batches that may wait for the worker, beside a step's own
_CLOSE_S = 5.0
KEPT_SHARE = 1 / 8
"""Of `prefetch_bytes`: passed windows of a step that a worker keeps, for a step that fails."""
_KEPT_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Assignment:
    number: int
    step: int
    ids: range
    num_steps: int  # 0: without end


@dataclass(frozen=True, slots=True)
class _Cut:
    """A micro-batch that is ready, or why there is none."""

    assignment: int
    step: int
    microbatch_id: int
    rows: np.ndarray
    batch: Any
    error: BaseException | None = None


class ParquetLoader:
    """Micro-batches of the windows of one feed, for one worker."""

    def __init__(
        self,
        feed: Feed,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
        on_stall: Callable[[], None] = lambda: None,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """kept_bytes: what passed windows of the step at hand may take."""
        self._feed, self._collate, self._on_stall = feed, collate, on_stall
        self._seed, self._global_batch, self._micro_batch = seed, global_batch, micro_batch
        self._kept_bytes = kept_bytes
        self._assignment = _Assignment(0, 0, range(0), 0)
        self._changed = threading.Condition()
        self._cuts: queue.Queue[_Cut] = queue.Queue()
        self._step = 0  # committed steps, as far as `next` and `assign` know
        self._is_closed = False
        self._windows: list[ParquetWindow] = []  # the thread's own, in stream order
        self._asked: tuple[int, Future[ParquetWindow]] | None = None
        """The element that was asked for in advance."""
        self._fetcher = ThreadPoolExecutor(1, "feed-fetch")
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def assign(self, step: int, ids: range) -> None:
        """Cut `ids` of step, step + 1, ... ahead; what was assigned before is forgotten."""
        self._assign(step, ids, num_steps=0)

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        """One micro-batch of the assignment, in its order (going back needs a new `assign`).

        StepCancelled within milliseconds of is_cancelled turning true; UserError if its rows
        cannot be read, or the user's transform or collate raised.
        """
        cut = self._take(step, microbatch_id, is_cancelled)
        if isinstance(cut.error, BadData):
            raise UserError(str(cut.error), cut.error.traceback_text)
        if isinstance(cut.error, WrongInput):  # of a feed that was started again
            raise UserError(str(cut.error), "")
        return self._loaded(cut)

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        """Exactly one micro-batch, for a probe. Ends the current assignment. WrongInput where
        `next` has a UserError, but for what the user's code raises.
        """
        self._assign(step, range(microbatch_id, microbatch_id + 1), num_steps=1)
        cut = self._take(step, microbatch_id, lambda: False)
        if isinstance(cut.error, BadData) and not cut.error.traceback_text:
            raise WrongInput(str(cut.error))
        if isinstance(cut.error, BadData):
            raise UserError(str(cut.error), cut.error.traceback_text)
        return self._loaded(cut)

    def _take(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> _Cut:
        if is_cancelled():
            raise StepCancelled
        self._step = step
        while True:
            cut = self._wait(is_cancelled)
            if cut.assignment != self._assignment.number:
                continue
            with self._changed:
                self._changed.notify()
            if (cut.step, cut.microbatch_id) == (step, microbatch_id):
                break
            assert (cut.step, cut.microbatch_id) < (step, microbatch_id), "going back"
        return cut

    def _loaded(self, cut: _Cut) -> LoadedBatch:
        if cut.error is not None:
            raise cut.error
        return LoadedBatch(cut.step, cut.microbatch_id, cut.rows, self._collated(cut))

    def close(self) -> None:
        self._is_closed = True
        with self._changed:
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        self._fetcher.shutdown(wait=True, cancel_futures=True)  # its wait looks at _is_closed

    # --- the worker's thread -------------------------------------------------------------
    def _assign(self, step: int, ids: range, num_steps: int) -> None:
        with self._changed:
            self._step = step
            number = self._assignment.number + 1
            self._assignment = _Assignment(number, step, ids, num_steps)
            self._cuts = queue.Queue()
            self._changed.notify()

    def _wait(self, is_cancelled: Callable[[], bool]) -> _Cut:
        waited_s = 0.0
        while True:
            try:
                return self._cuts.get(timeout=_POLL_S)
            except queue.Empty:
                if is_cancelled():
                    raise StepCancelled from None
            if waited_s <= _STALL_S < waited_s + _POLL_S:
                self._on_stall()
            waited_s += _POLL_S

    def _collated(self, cut: _Cut) -> Any:
        if self._collate is None:
            return cut.batch
        seed_microbatch(self._seed, cut.step, cut.microbatch_id)
        try:
            return self._collate(samples_of(cut.batch))
        except Exception as error:
            first = cut.step * self._global_batch + cut.microbatch_id * self._micro_batch
            where = f"stream positions {first}..{first + self._micro_batch - 1}"
            what = f"{in_words(error)}, collating the samples at {where}"
            raise UserError(what, traceback.format_exc()) from None

    # --- the feed's thread ----------------------------------------------------------------
    def _run(self) -> None:
        number, done = 0, 0
        while not self._is_closed:
            with self._changed:
                assignment, cuts = self._assignment, self._cuts
                if assignment.number != number:
                    number, done = assignment.number, 0
                ids = assignment.ids
                is_over = bool(assignment.num_steps) and done >= assignment.num_steps * len(ids)
                if not ids or is_over or cuts.qsize() >= _AHEAD + len(ids):
                    self._changed.wait(1.0)
                    continue
            steps, place = divmod(done, len(ids))
            with suppress(StepCancelled):  # another assignment is there, or the end
                cuts.put(self._cut(assignment, assignment.step + steps, ids.start + place))
                done += 1

    def _cut(self, assignment: _Assignment, step: int, microbatch_id: int) -> _Cut:
        nothing = np.empty(0, np.int64)
        try:
            rows, batch = self._rows_of(assignment, step, microbatch_id)
        except Exception as error:  # said by `next`, in the worker's own thread
            return _Cut(assignment.number, step, microbatch_id, nothing, None, error)
        return _Cut(assignment.number, step, microbatch_id, rows, batch)

    def _rows_of(
        self, assignment: _Assignment, step: int, microbatch_id: int
    ) -> tuple[np.ndarray, Any]:
        """A micro-batch's row ids and columns."""
        length = self._feed.row_length
        first = (step * self._global_batch + microbatch_id * self._micro_batch) * length
        end = first + self._micro_batch * length
        tables: list[Any] = []
        ids: list[np.ndarray] = []
        starts = np.arange(first, end, length)  # of the rows
        at, is_packed = first, False
        while at < end:
            window = self._window_at(at, assignment)
            is_packed = window.rows.starts is not None
            stop = min(end, window.end)
            tables.append(window.rows.table.slice(at - window.first, stop - at))
            here = starts[(starts >= at) & (starts < stop)]
            ids.append(window.rows.ids_of(here - window.first))
            at = stop
        try:
            return np.concatenate(ids), columns_of(tables, length, is_packed=is_packed)
        except BadData as error:
            where = f"stream positions {first // length}..{end // length - 1}, {error.place}"
            raise BadData(where, error.what, error.traceback_text) from error

    def _window_at(self, element: int, assignment: _Assignment) -> ParquetWindow:
        """Held, or fetched while nobody assigns anything else. The one after it is asked for."""
        committed = self._step * self._global_batch * self._feed.row_length
        self._windows = self._kept(min(committed, element), element)
        for window in self._windows:
            if window.first <= element < window.end:
                return window

        def is_over() -> bool:
            return self._is_closed or self._assignment.number != assignment.number

        window = self._asked_window(element, is_over)
        if window is None:
            window = self._feed.window_at(element, committed, is_over)
        self._windows.append(window)
        is_closed = lambda: self._is_closed  # noqa: E731
        self._asked = (
            window.end,
            self._fetcher.submit(self._feed.window_at, window.end, committed, is_closed),
        )
        return window

    def _kept(self, oldest: int, element: int) -> list[ParquetWindow]:
        """The windows that are worth their memory: none before `oldest`, few before `element`."""
        kept: list[ParquetWindow] = []
        room = self._kept_bytes
        for window in self._windows:
            is_passed = window.end <= element
            if window.end > oldest and (not is_passed or window.rows.size_bytes <= room):
                kept.append(window)
                room -= window.rows.size_bytes if is_passed else 0
        return kept

    def _asked_window(self, element: int, is_over: Callable[[], bool]) -> ParquetWindow | None:
        """The window that was asked for in advance, if it is the one; waits for it, because asking
        twice makes nothing faster."""
        if self._asked is None or element < self._asked[0]:
            return None
        pending = self._asked[1]
        while not wait([pending], _CHECK_S).done:
            if is_over():
                raise StepCancelled
        self._asked = None
        if pending.exception() is not None:  # asked again, it is raised where it belongs
            return None
        window = pending.result()
        return window if window.first <= element < window.end else None
