# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`RayFeed`: a worker's way to the feed. It fetches windows; what is in them is the worker's."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.exceptions import ObjectLostError as RayObjectLost

from elastic.data.reading import WindowRows
from elastic.on_ray.feed.order import FeedOrder, Served, folder_here, see_folder
from elastic.on_ray.feed.start import start_feed
from elastic.on_ray.naming import find_actor
from elastic.protocol.errors import BadData, StepCancelled, WrongInput
from elastic.protocol.worker_spec import ParquetWindow, WorkerSpec

POLL_S = 0.25
"""How soon a wait for the feed notices that nobody wants its window any more."""
AGAIN_S = 3.0
"""A feed that is dead for good is started again after so long."""
PATIENCE_S = 0.5
"""A window that is read and does not come for so long is asked for again."""


def leave_ray() -> None:
    """In a forked process: Ray raises there, where it would hang. Private API, this place only."""
    from ray._private.worker import global_worker

    global_worker.set_is_connected(False)
    ray.init = _refuse  # Ray starts itself through it


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("Ray cannot be used in a forked process")


class RayFeed:
    """The `Feed` of elastic/protocol/worker_spec.py."""

    def __init__(self, order: FeedOrder) -> None:
        see_folder(order.folder)
        self.row_length = cloudpickle.loads(order.source).row_length if order.source else 1
        self._order = order
        self._actor: Any = start_feed(order)

    def window_at(self, element: int, committed: int, is_over: Callable[[], bool]) -> ParquetWindow:
        """As the seam says; waits while the feed is started again or a node is replaced."""
        handed: dict[Any, Served] = {}  # those before the newest: a slow pull goes on
        while True:
            try:
                served: Served = self._get(
                    self._actor.window_at.remote(element, committed), is_over
                )
                handed[served.rows[0]] = served
                found = self._first_of(handed, is_over)
            except (RayObjectLost, RayActorError) as error:  # its owner or node is gone: ask again
                handed.clear()
                if is_over():
                    raise StepCancelled from None
                if isinstance(error, ActorDiedError):  # Ray has given it up
                    self._start_again(is_over)
                continue
            if found is not None:
                return found

    def _start_again(self, is_over: Callable[[], bool]) -> None:
        """After a while: it may have been ended because the run is, and this worker is next."""
        deadline = time.monotonic() + AGAIN_S
        while time.monotonic() < deadline:
            if is_over():
                raise StepCancelled
            time.sleep(POLL_S)
        if find_actor(f"{self._order.run_id}-controller") is not None:
            self._actor = start_feed(self._order)

    def _first_of(
        self, handed: Mapping[Any, Served], is_over: Callable[[], bool]
    ) -> ParquetWindow | None:
        """The first of these that is here; None if none is after a while. Ray can lose count of
        who holds a reference that is handed out twice, and its object never comes then."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ready, _ = ray.wait(list(handed), timeout=POLL_S)
            if ready:
                served, rows = handed[ready[0]], self._get(ready[0], is_over)
                if served.first_row is not None:
                    rows = of_block(rows, served.first_row)
                return ParquetWindow(served.first, served.count, rows)
            if is_over():
                raise StepCancelled
        return None

    def _get(self, reference: Any, is_over: Callable[[], bool]) -> Any:
        while True:
            try:
                return ray.get(reference, timeout=POLL_S)
            except GetTimeoutError:
                if is_over():
                    raise StepCancelled from None
            except RayTaskError as error:
                if isinstance(error.cause, BadData | WrongInput):
                    raise error.cause from None
                raise


def of_block(block: Any, first_row: int) -> WindowRows:
    """A block of Ray Data, an Arrow table or a data frame, as a window."""
    from ray.data.block import BlockAccessor

    table = BlockAccessor.for_block(block).to_arrow()
    ids = np.arange(first_row, first_row + table.num_rows, dtype=np.int64)
    return WindowRows(table, ids, None)


def located(source: bytes, folder: str | None) -> bytes:
    """What `dataset()` gave in this worker, for processes of other nodes."""
    found, here = cloudpickle.loads(source), folder_here(folder)
    return cloudpickle.dumps(found.at(os.getcwd()) if here is None else found.within(here))


def open_feed(spec: WorkerSpec, workload: bytes, source: bytes) -> RayFeed:
    """The run's feed, for one of its workers. source: as workers/data/supply.py has it."""
    return RayFeed(
        FeedOrder(
            run_id=spec.run_id,
            source=source and located(source, spec.folder),
            workload=b"" if source else workload,
            folder=spec.folder,
            seed=spec.seed,
            place=spec.place,
            num_samples=spec.steps * spec.global_batch,
        )
    )
