"""`Supply`: a worker's micro-batches, wherever `dataset()` says that they come from.

A map-style dataset is loaded by the worker's own processes (loader.py), Parquet and Ray Data come
through the run's feed (parquet_loader.py). Only a loader process can tell, so the choice is made
when it has called `dataset()`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from cloudpickle import loads

from elastic.protocol.errors import UserError, WrongInput
from elastic.protocol.worker_spec import Feed, WorkerSpec
from workers.data.agreement import watch_length
from workers.data.loader import LoadedBatch, Loader
from workers.data.parquet_loader import KEPT_SHARE, ParquetLoader

OpenFeed = Callable[[bytes], Feed]
"""From a pickled source (empty: `dataset()` is to be called where Ray can be used) to its feed."""


class Supply:
    """The interface of `Loader`. Make it in the main thread and early: it forks."""

    def __init__(
        self,
        workload: Any,
        spec: WorkerSpec,
        open_feed: OpenFeed,
        on_stall: Callable[[], None],
        loader: Loader,
    ) -> None:
        self._workload, self._spec = workload, spec
        self._open_feed, self._on_stall, self._loader = open_feed, on_stall, loader
        self._refusals: list[WrongInput] = []
        self._chosen: Future[Loader | ParquetLoader] = Future()
        threading.Thread(target=self._choose, name="supply", daemon=True).start()

    def _choose(self) -> None:
        """Beside the building of the model, so that a feed starts early."""
        try:
            self._chosen.set_result(self._choice())
        except BaseException as error:
            self._chosen.set_exception(error)

    def _choice(self) -> Loader | ParquetLoader:
        source = self._loader.source()
        if source is None:
            if self._spec.place:
                watch_length(self._spec.place, self._loader.num_rows, self._refusals.append)
            return self._loader
        self._loader.close()
        feed = self._open_feed(source)
        kept = {"kept_bytes": int(KEPT_SHARE * loads(source).prefetch_bytes)} if source else {}
        return ParquetLoader(
            feed,
            **kept,
            seed=self._spec.seed,
            global_batch=self._spec.global_batch,
            micro_batch=self._spec.micro_batch,
            collate=getattr(self._workload, "collate", None),
            on_stall=self._on_stall,
        )

    def assign(self, step: int, ids: range) -> None:
        """See Loader.assign. Waits until `dataset()` has returned; raises what it raised."""
        self._chosen.result().assign(step, ids)

    def next(self, step: int, microbatch_id: int, is_cancelled: Callable[[], bool]) -> LoadedBatch:
        """See Loader.next. UserError, too, if another worker has another dataset."""
        if self._refusals:
            raise UserError(str(self._refusals[0]), "")
        return self._chosen.result().next(step, microbatch_id, is_cancelled)

    def fetch(self, step: int, microbatch_id: int) -> LoadedBatch:
        """See Loader.fetch."""
        return self._chosen.result().fetch(step, microbatch_id)
