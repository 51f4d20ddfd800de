"""Rows of Ray Data per second: a script's shards on elastic against Ray Train's `streaming_split`.

Both deliver each row of the same data set once, as tensors, to as many consumer actors in one Ray;
both execute the data set anew for each pass. A consumer of ours has the `Shard` that
`get_dataset_shard()` gives in a worker. Batches are touched, and nothing is trained.
    python -m tests.bench.script_rows --pairs 9 --workers 3
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.data
from ray.train import DataConfig

from elastic.data.place import Places
from elastic.on_ray.feed.datasets import Datasets, pack
from elastic.on_ray.feed.passes_actor import PassesFeed
from elastic.on_ray.feed.shard import Seat, Shard
from elastic.on_ray.naming import NAMESPACE, end, find_actor
from tests.bench.harness import alternating, machine, record, report, storage_directory

ROWS, WIDTH, BLOCKS, BATCH = 200_000, 256, 40, 128
"""float32 rows of 1 KiB; of a batch so many."""
DEADLINE_S = 900.0
RUN = "bench-rows"


def widened(rows: Any) -> Any:
    """What is executed in each pass."""
    ids = rows["id"].astype(np.float32)
    return {"id": rows["id"], "x": np.repeat(ids[:, None], WIDTH, axis=1)}


class Controller:
    """Is there: a feed without one ends itself."""

    def note(self, fields: dict[str, Any]) -> None:
        print(fields, flush=True)


class Consumer:
    """One rank."""

    def read(self, shard: Any) -> tuple[int, int]:
        """A pass: its rows, and the sum of their ids."""
        rows = ids = 0
        for batch in shard.iter_torch_batches(batch_size=BATCH):
            rows += len(batch["x"])
            ids += int(batch["id"].sum())
        return rows, ids

    def read_ours(self, datasets: Datasets, run_id: str, rank: int, ranks: int) -> tuple[int, int]:
        feed = PassesFeed(run_id, datasets)
        seat = Seat(call=0, rank=rank, ranks=ranks, run=run_id, check=lambda: None)
        return self.read(Shard("train", feed, seat, Places(), is_split=True))


def rows_per_second(begin: Callable[[], list[Any]]) -> float:
    """Of all consumers together; begin: gives what each comes to."""
    began = time.perf_counter()
    found = ray.get(begin(), timeout=DEADLINE_S)
    seconds = time.perf_counter() - began
    rows, ids = (sum(column) for column in zip(*found, strict=True))
    assert (rows, ids) == (ROWS, ROWS * (ROWS - 1) // 2), f"{rows} of {ROWS} rows"
    return rows / seconds


def measure(pairs: int, workers: int) -> dict[str, str]:
    """Of passes in turn, on consumers that stay."""
    with storage_directory() as temp:
        ray.init(
            num_cpus=workers + 4,
            include_dashboard=False,
            log_to_driver=False,
            namespace=NAMESPACE,
            _temp_dir=str(temp),
        )
        try:
            return measured(pairs, workers)
        finally:
            ray.shutdown()


def measured(pairs: int, workers: int) -> dict[str, str]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.range(ROWS, override_num_blocks=BLOCKS).map_batches(widened)
    packed = pack({"train": dataset}, DataConfig(), workers, 0)
    consumer: Any = ray.remote(Consumer)
    consumers = [consumer.remote() for _ in range(workers)]
    controller: Any = ray.remote(Controller)
    numbers = itertools.count()

    def ours() -> float:
        """A run of its own each time, as theirs has a coordinator of its own."""
        run_id = f"{RUN}-{next(numbers)}"
        alive = controller.options(name=f"{run_id}-controller", num_cpus=0).remote()
        found = rows_per_second(
            lambda: [
                each.read_ours.remote(packed, run_id, rank, workers)
                for rank, each in enumerate(consumers)
            ]
        )
        for name in (f"{run_id}-feed", f"{run_id}-controller"):
            if (actor := find_actor(name)) is not None:
                end(actor)
        del alive
        return found

    def theirs() -> float:
        splits = dataset.streaming_split(workers, equal=False)
        return rows_per_second(
            lambda: [each.read.remote(s) for each, s in zip(consumers, splits, strict=True)]
        )

    for first in (ours, theirs):  # both have loaded what they need then
        first()
    mine, peer = alternating(pairs, ours, theirs)
    ratios = [a / b for a, b in zip(mine, peer, strict=True)]
    return {
        "rows/s": f"{statistics.median(mine):.0f}",
        "streaming_split, rows/s": f"{statistics.median(peer):.0f}",
        "ratio of pairs": f"{statistics.median(ratios):.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    about = machine(given.workers)
    results = measure(given.pairs, given.workers)
    report("rows of Ray Data", list(results), [list(results.values())])
    setting = f"{ROWS} rows of {WIDTH} float32, batches of {BATCH}, {given.workers} consumers"
    record("script rows", about=about, setting=f"{setting}, {given.pairs} pairs", results=results)


if __name__ == "__main__":
    main()
