"""The feed against Ray Data's `streaming_split(2)` on one Parquet set, and what a resume costs.

    python -m tests.bench.feed [--gigabytes 1] [--pairs 5] [--resumes 9]

Both deliver every row once, as tensors, to two consumer actors; both apply the same transform. A
consumer of ours is what a worker has: a `ParquetLoader` on the run's feed. The set is made once per
machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from elastic.data import ParquetSource, parquet
from elastic.data.footers import make_plan
from tests.bench.harness import alternating, machine, record, report, storage_directory
from workers.workloads.parquet import shared_folder, write_once

WIDTH = 256  # floats per row: 1 KiB
ROWS_PER_FILE, ROWS_PER_GROUP = 65_000, 16_250
CONSUMERS, MICRO_BATCH = 2, 64
GLOBAL_BATCH = CONSUMERS * 4 * MICRO_BATCH
DEADLINE_S = 900.0


def data_set(gigabytes: float) -> Path:
    """Files of random rows, made once per machine."""
    files = max(1, round(gigabytes * 2**30 / (ROWS_PER_FILE * WIDTH * 4)))
    folder = shared_folder(f"bench-{files}")
    write_once(folder, ((f"{i:04d}.parquet", table_of(i)) for i in range(files)), ROWS_PER_GROUP)
    return folder


def table_of(number: int) -> Any:
    values = np.random.default_rng(number).random(ROWS_PER_FILE * WIDTH, np.float32)
    x = pa.FixedSizeListArray.from_arrays(values, WIDTH)
    return pa.table({"x": x, "row": np.arange(ROWS_PER_FILE) + number * ROWS_PER_FILE})


def centred(table: Any) -> Any:
    """The transform of both: a table to a table."""
    values = table.column("x").combine_chunks().flatten().to_numpy()
    return pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(values - np.float32(0.5)), WIDTH),
            "row": table.column("row"),
        }
    )


def source_of(folder: Path) -> ParquetSource:
    return parquet(folder, transform=centred, keeps_rows=True)


class Consumer:
    """One rank: takes its micro-batches of some steps, and touches them."""

    def feed(self, order: Any, rank: int, first_step: int, steps: int) -> tuple[int, float]:
        """Rows received, and the seconds until the first batch."""
        from elastic.on_ray.feed.client import RayFeed
        from elastic.protocol.mesh import microbatch_ids
        from workers.data.parquet_loader import ParquetLoader

        began = time.perf_counter()
        loader = ParquetLoader(
            RayFeed(order), seed=order.seed, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH
        )
        ids = microbatch_ids(GLOBAL_BATCH // MICRO_BATCH, CONSUMERS, rank)
        loader.assign(first_step, ids)
        rows, first_s = 0, 0.0
        for step in range(first_step, first_step + steps):
            for i in ids:
                batch = loader.next(step, i, lambda: False).batch
                first_s = first_s or time.perf_counter() - began
                rows += len(batch["row"])
        loader.close()
        return rows, first_s

    def split(self, shard: Any) -> tuple[int, float]:
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=MICRO_BATCH):
            rows += len(batch["row"])
        return rows, 0.0


def with_consumers(body: Callable[[list[Any]], list[Any]]) -> tuple[list[Any], float]:
    """What the consumers give, and the seconds that they took; they are started before."""
    consumers = [ray.remote(Consumer).options(num_cpus=0).remote() for _ in range(CONSUMERS)]
    ray.get([c.__ray_ready__.remote() for c in consumers], timeout=DEADLINE_S)
    began = time.perf_counter()
    results = ray.get(body(consumers), timeout=DEADLINE_S)
    took_s = time.perf_counter() - began
    for consumer in consumers:
        ray.kill(consumer)
    return results, took_s


def ours(folder: Path, first_step: int, steps: int) -> tuple[float, float]:
    """(rows per second, seconds to the first batch on the later rank) of a feed of its own."""
    import cloudpickle

    from elastic.on_ray.feed.order import FeedOrder
    from elastic.on_ray.feed.start import end_feed

    run_id = f"bench-{time.monotonic_ns()}"
    controller = ray.remote(Consumer).options(
        name=f"{run_id}-controller", namespace="elastic", num_cpus=0
    )
    alive = controller.remote()  # a feed ends itself without a controller
    ray.get(alive.__ray_ready__.remote(), timeout=DEADLINE_S)
    order = FeedOrder(
        run_id=run_id,
        source=cloudpickle.dumps(source_of(folder)),
        workload=b"",
        folder=None,
        seed=0,
        place=str(folder / "nowhere"),
    )
    try:
        results, took_s = with_consumers(
            lambda consumers: [
                c.feed.remote(order, rank, first_step, steps) for rank, c in enumerate(consumers)
            ]
        )
    finally:
        end_feed(run_id)
        ray.kill(alive)
    return sum(rows for rows, _ in results) / took_s, max(first for _, first in results)


def theirs(folder: Path) -> float:
    """Rows per second of streaming_split(2)."""
    dataset = ray.data.read_parquet(str(folder)).map_batches(
        centred, batch_format="pyarrow", batch_size=None
    )
    shards = dataset.streaming_split(CONSUMERS, equal=False)
    results, took_s = with_consumers(
        lambda consumers: [c.split.remote(s) for c, s in zip(consumers, shards, strict=True)]
    )
    return sum(rows for rows, _ in results) / took_s


def main(gigabytes: float, pairs: int, resumes: int) -> None:
    about = machine(CONSUMERS)
    folder = data_set(gigabytes)
    plan = make_plan(source_of(folder), 0)
    steps = plan.num_rows // GLOBAL_BATCH
    with storage_directory() as place:
        ray.init(
            num_cpus=CONSUMERS + 2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=2**31,
            _temp_dir=str(place / "ray"),
            namespace="elastic",
        )
        import ray.data as ray_data

        ray_data.DataContext.get_current().enable_progress_bars = False
        try:
            ours(folder, 0, 10)  # processes, imports, page cache
            start, middle = alternating(
                resumes, lambda: ours(folder, 0, 5)[1], lambda: ours(folder, steps // 2, 5)[1]
            )
            fed, split = alternating(
                pairs, lambda: ours(folder, 0, steps)[0], lambda: theirs(folder)
            )
        finally:
            ray.shutdown()
    ratio = statistics.median(a / b for a, b in zip(fed, split, strict=True))
    resume = statistics.median(b / a for a, b in zip(start, middle, strict=True))
    results = {
        "feed": f"{statistics.median(fed):,.0f} rows/s",
        "streaming_split(2)": f"{statistics.median(split):,.0f} rows/s",
        "ratio": f"{ratio:.2f}",
        "first batch at the start": f"{1e3 * statistics.median(start):.0f} ms",
        "in the middle": f"{1e3 * statistics.median(middle):.0f} ms",
        "resume ratio": f"{resume:.2f}",
    }
    report("Feed", ("measure", "median"), list(results.items()))
    windows = len(plan.windows(0))
    setting = f"{gigabytes} GB, {plan.num_rows:,} rows in {windows} windows, medians of {pairs}"
    setting += f", of {resumes} resumes"
    record("feed", about=about, setting=setting, results=results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5, help="of whole epochs")
    parser.add_argument("--resumes", type=int, default=9, help="pairs of first batches")
    options = parser.parse_args()
    main(options.gigabytes, options.pairs, options.resumes)
