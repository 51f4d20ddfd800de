"""Random histories of a fed run, in one process: the real feed and the real loaders, ranks as
objects, losses as what they do to them. Imported by tests."""

import asyncio
import hashlib
import random
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.data.record import open_record
from elastic.data.serving import Read, Server
from elastic.protocol.mesh import microbatch_ids
from elastic.protocol.worker_spec import ParquetWindow
from workers.data.parquet_loader import ParquetLoader

DEADLINE_S = 120.0
SEED, GLOBAL_BATCH, MICRO_BATCH = 3, 24, 3
V = GLOBAL_BATCH // MICRO_BATCH
SIZES = (37, 0, 101, 1, 64)
ROWS = sum(SIZES)


def write_rows(folder: Path) -> Path:
    folder.mkdir()
    first = 0
    for i, size in enumerate(SIZES):
        table = pa.table({"row": np.arange(first, first + size)})
        pq.write_table(table, folder / f"p{i}.parquet", row_group_size=7 + 4 * i)
        first += size
    return folder


class LocalFeed:
    """`elastic.data.serving` in a thread of its own, where Ray would have an actor."""

    def __init__(self, source, place: Path, end: int | None = None) -> None:
        self.row_length = source.row_length
        self.reads, self.peak_bytes, self.notes = [], 0, []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.record = open_record(make_plan(source, SEED), str(place))
        self.plan = self.record.plan
        self.server = Server(self.record, self.read, self.notes.append, end)

    async def read(self, key, left_out, checksums) -> Read:
        self.reads.append(key)
        await asyncio.sleep(0)
        rows, skipped = read_window(self.plan, key.epoch, key.window, left_out, checksums)
        self.peak_bytes = max(self.peak_bytes, sum(self.server.ahead.held.values()))
        return Read(rows, rows.count, rows.size_bytes, skipped, rows.checksums)

    def window_at(self, element, committed, is_over) -> ParquetWindow:
        waiting = asyncio.run_coroutine_threadsafe(
            self.server.window_at(element, committed), self.loop
        )
        place, rows = waiting.result(DEADLINE_S)
        return ParquetWindow(place.first, place.count, rows)

    def close(self) -> None:
        self.record.write()
        asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result(DEADLINE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(DEADLINE_S)
        self.loop.close()


async def cancel_others() -> None:
    """What a killed actor would not do any more."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SharedFeed:
    """What workers hold of the run's feed: it may be another one the next time."""

    def __init__(self, source, place: Path) -> None:
        self.source, self.place = source, place
        self.row_length = source.row_length
        self.lock = threading.Lock()
        self.feed = LocalFeed(source, place)

    def window_at(self, element, committed, is_over) -> ParquetWindow:
        with self.lock:  # a call is made again where the feed was started again, as Ray does
            return self.feed.window_at(element, committed, is_over)

    def restart(self, *, keeps_record: bool) -> None:
        with self.lock:
            self.feed.close()
            if not keeps_record:
                (self.place / "data.json").unlink(missing_ok=True)
            self.feed = LocalFeed(self.source, self.place)


class Run:
    """Ranks with loaders, and the weights: one per row, in float32 with a rate that rounds."""

    def __init__(self, source, place: Path, draw: random.Random) -> None:
        (place / "config.json").write_text("{}")
        self.feed, self.draw = SharedFeed(source, place), draw
        self.loaders: list[ParquetLoader] = []
        self.step, self.weights = 0, np.zeros(ROWS, np.float32)
        self.samples: list[str] = []
        self.rows: list[int] = []
        self.checkpoint = (0, self.weights.copy())

    def set_world(self, size: int) -> None:
        while len(self.loaders) > size:
            self.loaders.pop(self.draw.randrange(len(self.loaders))).close()
        while len(self.loaders) < size:
            self.loaders.append(
                ParquetLoader(
                    self.feed, seed=SEED, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
                )
            )
        for rank, loader in enumerate(self.loaders):
            loader.assign(self.step, microbatch_ids(V, size, rank))

    def attempt(self, stop_at: int | None = None) -> None:
        """One step; given up at micro-batch `stop_at`, it leaves no trace."""
        taken: list[np.ndarray] = []
        for rank, loader in enumerate(self.loaders):
            for i in microbatch_ids(V, len(self.loaders), rank):
                if i == stop_at:
                    return
                loaded = loader.next(self.step, i, lambda: False)
                if "row" in loaded.batch:
                    assert loaded.batch["row"].shape == (MICRO_BATCH,)
                    taken.append(loaded.batch["row"].numpy())
                else:
                    taken.append(loaded.batch["tokens"].numpy().sum(axis=1) % ROWS)
                taken.append(loaded.rows)
        rows = np.concatenate(taken[0::2])
        for row in rows:
            self.weights[row] = (self.weights[row] + np.float32(1)) * np.float32(1.0000001)
        self.samples.append(hashlib.sha256(np.concatenate(taken[1::2]).tobytes()).hexdigest())
        self.rows += rows.tolist()
        self.step += 1

    def back_to_checkpoint(self) -> None:
        """Everybody is lost: what was done since is done again."""
        self.step, weights = self.checkpoint
        self.weights = weights.copy()
        del self.samples[self.step :], self.rows[self.step * GLOBAL_BATCH :]
        size = len(self.loaders)
        self.set_world(0)
        self.feed.restart(keeps_record=self.draw.random() < 0.5)
        self.set_world(size)

    def close(self) -> None:
        self.set_world(0)
        self.feed.feed.close()


def uninterrupted(source, place: Path, steps: int) -> Run:
    run = Run(source, place, random.Random(0))
    run.set_world(1)
    while run.step < steps:
        run.attempt()
    run.close()
    return run


def random_history(source, place: Path, steps: int, seed: int) -> Run:
    """Kills, shrinks, grows, drains, restarts and lost feeds, at random."""
    draw = random.Random(seed)
    run = Run(source, place, draw)
    run.set_world(draw.randint(1, V))
    while run.step < steps:
        fate = draw.random()
        if fate < 0.1:  # a loss inside the step
            run.attempt(stop_at=draw.randrange(V))
            run.set_world(max(1, len(run.loaders) - 1))
        elif fate < 0.2:  # join or drain at a boundary
            run.set_world(draw.randint(1, V))
        elif fate < 0.23:
            run.feed.restart(keeps_record=draw.random() < 0.5)
        elif fate < 0.26:
            run.back_to_checkpoint()
        elif fate < 0.4:
            run.checkpoint = (run.step, run.weights.copy())
        run.attempt()
    run.close()
    return run
