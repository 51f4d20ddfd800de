# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The feed: an actor that has windows of the data read ahead, by Ray tasks anywhere in the cluster.

It never sees a row: tasks put windows into the object store, workers take them from there (their
side is client.py). What is read when is elastic/data's; killed, the actor is started again
and goes on where the workers ask.
"""

import asyncio
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from elastic.data.footers import make_plan
from elastic.data.patience import MAX_TRIES, Late, Patience
from elastic.data.plan import Plan
from elastic.data.reading import Skipped, WindowRows, read_window, units_text
from elastic.data.record import FeedRecord, open_record
from elastic.data.serving import Read, Server
from elastic.data.source import ParquetSource, is_uri
from elastic.data.stream import WindowKey
from elastic.on_ray.feed.order import (
    FeedOrder,
    Served,
    end_when_alone,
    folder_here,
    note,
    see_folder,
    unpacked_folder,
)
from elastic.protocol.errors import BadData, WrongInput
from elastic.store.remote import patiently

WRITE_EVERY_S = 0.5
WRITE_REMOTE_EVERY_S = 5.0
STORE_SHARE = 0.5
LATE_CHECK_S = 1.0
WAITS = "a process to read data"
BEGIN_S = 5.0
"""A task that is not answered for so long begins all the same: the feed is being started again."""


class FeedActor:
    """Serves the windows of a Parquet source: the process around elastic.data.serving."""

    def __init__(self, order: FeedOrder) -> None:
        self._order = order
        self._lock = asyncio.Lock()
        self._server: Server | None = None
        self._tasks: list[asyncio.Future[None]] = []
        self._patience = Patience()

    async def window_at(self, element: int, committed: int) -> Served:
        """See Server.window_at; raises WrongInput, too, as planning does."""
        async with self._lock:
            if self._server is None:
                self._server = await self._open()
        place, rows = await self._server.window_at(element, committed)
        return Served(place.first, place.count, [rows])

    async def write_record(self) -> None:
        """What is news of it."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._server.record.write)

    async def began(self, epoch: int, window: int) -> int | None:
        """Said by a task before it reads: how many have died of it; None: it shall give up."""
        return self._patience.began(WindowKey(epoch, window), time.monotonic())

    async def held_bytes(self) -> int:
        """What the windows take that are held now."""
        return 0 if self._server is None else sum(self._server.ahead.held.values())

    async def _open(self) -> Server:
        order = self._order
        see_folder(order.folder)
        source = within_stores(local_source(order.source, order.folder), self._note)
        if order.folder is None and unpacked_folder() is not None:
            refuse_unshipped(source)
        loop = asyncio.get_running_loop()
        is_wary = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        planning = functools.partial(make_plan, source, order.seed, is_wary=is_wary)
        made = await loop.run_in_executor(None, planning)
        opening = functools.partial(open_record, made, order.place)
        record = await loop.run_in_executor(None, patiently, opening)
        plan = record.plan
        self._plan = ray.put(cloudpickle.dumps(plan))
        options: dict[str, Any] = {
            "num_returns": 2,
            "num_cpus": source.cpus_per_read,
            "max_retries": -1,
            "scheduling_strategy": "SPREAD",
        }
        self._task = cast(Any, ray.remote(read_task)).options(**options)
        for file in plan.files:
            if file.problem:
                self._note({"skipped": file.problem})
        self._tasks = [
            asyncio.ensure_future(keep_written(record)),
            asyncio.ensure_future(end_when_alone(order.run_id)),
            asyncio.ensure_future(self._tell_late(plan)),
        ]
        end = None if order.num_samples is None else order.num_samples * source.row_length
        return Server(record, self._read, self._note, end)

    async def _read(
        self, key: WindowKey, left_out: tuple[int, ...], checksums: dict[int, int]
    ) -> Read:
        folder, here = self._order.folder, ray.get_runtime_context().current_actor
        self._patience.asked(key, time.monotonic())
        ask = self._task.remote
        rows, told = ask(folder, self._plan, here, key, left_out, checksums)
        try:
            return Read(rows, *await told)
        except RayTaskError as error:
            if isinstance(error.cause, BadData):
                raise error.cause from None
            raise
        finally:
            self._patience.ended(key, time.monotonic())

    async def _tell_late(self, plan: Plan) -> None:
        while True:
            await asyncio.sleep(LATE_CHECK_S)
            for late in self._patience.late(time.monotonic()):
                self._note(late_note(plan, late))

    def _note(self, fields: dict[str, Any]) -> None:
        note(self._order.run_id, fields)


def late_note(plan: Plan, late: Late) -> dict[str, Any]:
    """For the journal."""
    if not late.has_begun:
        cpus = plan.source.cpus_per_read
        what = f"a CPU to read data (cpus_per_read={cpus}; 0 needs none)" if cpus else WAITS
        return {"waiting_for": what, "waited_s": round(late.waited_s)}
    units = units_text(plan.windows(late.key.epoch)[late.key.window])
    times = {"reading_s": round(late.waited_s), "usual_s": round(late.usual_s, 2)}
    return {"slow_read": units, **times}


def within_stores(source: ParquetSource, note: Callable[[dict[str, Any]], None]) -> ParquetSource:
    """With a budget that no node's object store has to spill for; says so where that is less."""
    sizes = [n["Resources"].get("object_store_memory") for n in ray.nodes() if n["Alive"]]
    most = int(STORE_SHARE * min((size for size in sizes if size), default=0))
    if not most or source.prefetch_bytes <= most:
        return source
    what = f"{source.prefetch_bytes} is more than half of a node's object store"
    note({"prefetch_bytes": most, "reason": what})
    return replace(source, prefetch_bytes=most)


async def keep_written(record: FeedRecord) -> None:
    """Write the record while it changes."""
    loop = asyncio.get_running_loop()
    every_s = WRITE_EVERY_S if record.folder.local else WRITE_REMOTE_EVERY_S
    while True:
        await asyncio.sleep(every_s)
        try:
            await loop.run_in_executor(None, record.write)
        except OSError as error:  # the record saves reading; the run goes on without it
            print(f'data record reason="{error}"', file=sys.stderr, flush=True)


def local_source(pickled: bytes, folder: str | None) -> ParquetSource:
    """A source that another process has pickled, as this one reads it."""
    source: ParquetSource = cloudpickle.loads(pickled)
    here = folder_here(folder)
    return source if here is None else source.at(here)


def refuse_unshipped(source: ParquetSource) -> None:
    """WrongInput if a relative path leads to nothing: ignored files are not shipped."""
    for path in source.paths:
        if not os.path.isabs(path) and not os.path.exists(source.place(path)) and not is_uri(path):
            raise WrongInput(
                f"data path {path!r} is not in the folder that Ray has shipped: it does not exist, "
                "or a .gitignore or .rayignore names it. Ship it, or give an absolute path that "
                "every node sees, or a URI"
            )


@functools.lru_cache(maxsize=4)
def _local_plan(pickled: bytes, folder: str | None) -> Plan:
    plan: Plan = cloudpickle.loads(pickled)
    here = folder_here(folder)
    return plan if here is None else replace(plan, source=plan.source.at(here))


def read_task(
    folder: str | None,
    plan: bytes,
    feed: ActorHandle[Any],
    key: WindowKey,
    left_out: tuple[int, ...],
    checksums: dict[int, int],
) -> tuple[WindowRows, tuple[int, int, list[Skipped], Mapping[int, int]]]:
    """A Ray task: a window's rows, and apart from them what the feed must know. Ray begins it again
    for as long as its process dies, so it asks first."""
    see_folder(folder)
    found, epoch, window = _local_plan(plan, folder), key.epoch, key.window
    deaths: int | None = 0
    with suppress(RayError):
        deaths = ray.get(cast(Any, feed).began.remote(epoch, window), timeout=BEGIN_S)
        if deaths is None:
            raise BadData(
                units_text(found.windows(epoch)[window]),
                f"the process that reads it was killed or crashed {MAX_TRIES} times; a node may be "
                "out of memory (smaller row groups or window_bytes), or the transform crashes",
            )
    is_wary = bool(deaths)
    rows, skipped = read_window(found, epoch, window, left_out, checksums, is_wary=is_wary)
    return rows, (rows.count, rows.size_bytes, skipped, rows.checksums)
