# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The feed of a `ray.data.Dataset`: Ray Data executes it in its own order, once per epoch.

There is no plan, so it can only be walked: going on at a row means executing the epoch from its
start and dropping what lies before. Its length is asked for at each start (`dataset.count()`, which
executes the pipeline unless the files' footers tell it) and compared with the run's record.
Parquet's feed (feed.py) is the one that can jump.
"""

import asyncio
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from elastic.data.dataset_record import DatasetFacts, compare_facts, write_facts
from elastic.data.footers import columns_text
from elastic.data.patience import WAIT_S
from elastic.on_ray.feed.order import FeedOrder, Served, end_when_alone, note, see_folder
from elastic.protocol.errors import BadData, WrongInput
from elastic.store.files import open_folder, reach_folder
from elastic.store.remote import patiently

KEPT_BEHIND = 2
"""Windows that are kept although they are committed: for a newcomer that tries a batch of them."""
PREFETCH_BYTES = 256 * 2**20
"""What Ray Data may take of the object store, about."""
WAITS = "a CPU to read data, if the cluster is full of trainers: Ray Data needs one per task"
COST = (
    "dataset() returned a ray.data.Dataset: each epoch has the rows in Ray Data's own order "
    "(preserve_order), and a resume or a restarted feed executes the epoch again up to its place. "
    "elastic.data.parquet(...) goes there directly, and shuffles by seed and epoch"
)


class DatasetFeedActor:
    """Serves the blocks of a Ray data set as windows, in order."""

    def __init__(self, order: FeedOrder) -> None:
        self._order = order
        self._dataset: Any = None
        self._num_rows = 0
        self._held: list[Served] = []  # in stream order, without gaps
        self._blocks: Iterator[tuple[Any, int]] = iter(())
        self._epoch, self._end = -1, 0  # of what has been taken from _blocks
        self._executor = ThreadPoolExecutor(1)
        self._facts: DatasetFacts | None = None
        self._is_recorded = False
        self._has_told_waiting = False
        self._alone: asyncio.Task[None] | None = None

    async def window_at(self, element: int, committed: int) -> Served:
        """As FeedActor's; a row is an element."""
        if self._alone is None:
            self._alone = asyncio.create_task(end_when_alone(self._order.run_id))
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(self._executor, self._serve, element, committed)
        done, _ = await asyncio.wait([asked], timeout=WAIT_S)
        if not done and not self._has_told_waiting:
            self._has_told_waiting = True
            note(self._order.run_id, {"waiting_for": WAITS, "waited_s": round(WAIT_S)})
        return await asked

    async def write_record(self) -> None:
        """The length and the columns, unless they are there."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._write)

    def _write(self) -> None:
        if self._facts is not None and not self._is_recorded:
            self._is_recorded = write_facts(open_folder(self._order.place), self._facts)

    def _serve(self, element: int, committed: int) -> Served:
        if self._dataset is None:
            self._open()
        oldest = min(element, committed)
        behind = sum(w.first + w.count <= oldest for w in self._held)
        self._held = self._held[max(0, behind - KEPT_BEHIND) :]
        if not self._held or element < self._held[0].first:
            is_ahead = not self._held and self._end <= element
            if not is_ahead or element // self._num_rows > self._epoch:
                self._start_epoch(element // self._num_rows)
        while True:
            for window in self._held:
                if window.first <= element < window.first + window.count:
                    return window
            self._take_block(oldest)

    def _open(self) -> None:
        from ray.data import DataContext

        from workers.step.randomness import seed_dataset

        context = DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        see_folder(self._order.folder)
        workload, _ = cloudpickle.loads(self._order.workload)
        if self._order.folder is not None:
            os.chdir(self._order.folder)  # as in a worker
        seed_dataset(self._order.seed)
        try:
            dataset = workload.dataset()
        except Exception as error:
            text = traceback.format_exc()
            what = f"raised {type(error).__name__}: {error}"
            raise BadData("dataset()", what, text) from None
        if not hasattr(dataset, "iter_internal_ref_bundles"):
            raise WrongInput(
                f"dataset() used Ray and returned a {type(dataset).__name__}; return a "
                "ray.data.Dataset, or make it without Ray"
            )
        options = dataset.context.execution_options
        options.preserve_order = True
        options.resource_limits = options.resource_limits.copy(object_store_memory=PREFETCH_BYTES)
        self._num_rows = dataset.count()
        if not self._num_rows:
            raise WrongInput("dataset() returned a ray.data.Dataset without a row")
        schema = dataset.schema()
        columns = {n: str(t) for n, t in zip(schema.names, schema.types, strict=True)}
        self._facts = DatasetFacts(self._num_rows, columns_text(columns))
        self._is_recorded = patiently(self._has_record)
        if not self._is_recorded:
            note(self._order.run_id, {"ray_dataset": COST})
        self._dataset = dataset

    def _has_record(self) -> bool:
        assert self._facts is not None
        return compare_facts(reach_folder(self._order.place), self._facts)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._end, self._held = epoch, epoch * self._num_rows, []
        self._blocks = self._executed()

    def _executed(self) -> Iterator[tuple[Any, int]]:
        for bundle in self._dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                yield entry.ref, entry.metadata.num_rows

    def _take_block(self, oldest: int) -> None:
        """The next block; it is held unless it lies before `oldest`."""
        try:
            reference, count = next(self._blocks)
        except StopIteration:
            expected = (self._epoch + 1) * self._num_rows
            if self._end != expected:
                raise BadData(
                    f"epoch {self._epoch} of the ray.data.Dataset",
                    f"has {self._end - self._epoch * self._num_rows} rows, and it had "
                    f"{self._num_rows}; it must have the same rows each time",
                ) from None
            self._epoch += 1
            self._blocks = self._executed()
            return
        with suppress(OSError):  # a store that is away: with a later block
            self._write()
        first, self._end = self._end, self._end + count
        if count and self._end > oldest:
            self._held.append(Served(first, count, [reference], first % self._num_rows))
