"""Peak use of Ray's object store by the feed, for a consumer ten times slower than the feed.

    python -m tests.bench.feed_memory [--budget-mb 128] [--steps 150]

Kinds of data: plain floats; dictionary-encoded columns, whose footers promise much less than the
values take; a transform that multiplies rows; many small files. Counted is the memory that the
store has ever touched, so its fragmentation is in it.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from elastic.data import ParquetSource, parquet
from elastic.on_ray.feed.client import RayFeed
from elastic.on_ray.feed.order import FeedOrder
from elastic.on_ray.feed.start import end_feed
from elastic.on_ray.naming import NAMESPACE
from tests.bench.harness import console, machine, record, report, storage_directory
from workers.data.parquet_loader import ParquetLoader

MICRO_BATCH, V = 64, 4
WARM_STEPS = 10
SLOWER = 10


@contextmanager
def own_ray(size_bytes: int, temp: Path | None = None) -> Iterator[None]:
    """This process is the driver of a Ray of one node."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=size_bytes,
        namespace=NAMESPACE,
        _temp_dir=None if temp is None else str(temp),
    )
    try:
        yield
    finally:
        ray.shutdown()


def store_bytes() -> int:
    """Memory that the object store of this driver's Ray has ever touched: it gives none back."""
    from ray._private import worker  # private API: tests and benchmarks only

    raylet = worker._global_node.all_processes["raylet"][0].process.pid
    files = [entry.stat() for entry in Path(f"/proc/{raylet}/fd").iterdir() if is_store(entry)]
    return 512 * sum({stat.st_ino: stat.st_blocks for stat in files}.values())


def is_store(entry: Path) -> bool:
    return str(entry.readlink()).startswith("/dev/shm/plasma")


class Controller:
    """A feed ends itself without one."""

    def note(self, fields: dict[str, Any]) -> None:
        raise AssertionError(fields)


@contextmanager
def feed_of(source: ParquetSource, run_id: str) -> Iterator[FeedOrder]:
    """A feed without a run, in the Ray that this process is connected to."""
    controller = ray.remote(Controller).options(
        name=f"{run_id}-controller", namespace=NAMESPACE, num_cpus=0
    )
    alive = controller.remote()
    ray.get(alive.__ray_ready__.remote(), timeout=60)
    order = FeedOrder(
        run_id=run_id,
        source=cloudpickle.dumps(source),
        workload=b"",
        folder=None,
        seed=0,
        place="/nowhere",
    )
    try:
        yield order
    finally:
        end_feed(run_id)
        ray.kill(alive)


def consume(loader: ParquetLoader, first: int, steps: int, pause_s: float) -> float:
    """Take some steps, pausing before each; gives the seconds of one."""
    began = time.perf_counter()
    for step in range(first, first + steps):
        time.sleep(pause_s)  # the consumer's work
        for i in range(V):
            loader.next(step, i, lambda: False)
    return (time.perf_counter() - began) / steps


def slow_consumer(source: ParquetSource, steps: int) -> int:
    """Take `steps` steps ten times slower than the first few; gives the bytes of the store."""
    sizes = {"global_batch": MICRO_BATCH * V, "micro_batch": MICRO_BATCH}
    with feed_of(source, "memory") as order:
        with closing(ParquetLoader(RayFeed(order), seed=0, **sizes)) as loader:
            loader.assign(0, range(V))
            quick_s = consume(loader, 0, WARM_STEPS, 0.0)
            consume(loader, WARM_STEPS, steps, min(0.1, (SLOWER - 1) * quick_s))
        return store_bytes()


def tripled(table: Any) -> Any:
    """Three rows for each, and some columns more."""
    return pa.concat_tables([table.append_column("again", table.column("x"))] * 3)


def floats(folder: Path, files: int, rows: int, groups: int) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for i in range(files):
        x = pa.FixedSizeListArray.from_arrays(draw.random(rows * 64, np.float32), 64)
        pq.write_table(pa.table({"x": x}), folder / f"{i:04d}.parquet", row_group_size=groups)
    return folder


def repeats(folder: Path, files: int, rows: int, groups: int) -> Path:
    """Few different values, which dictionaries make small."""
    folder.mkdir()
    for i in range(files):
        kinds = np.arange(rows) // 50 % 7
        text = np.array([f"a rather long text, number {k}" for k in range(7)])[kinds]
        table = pa.table({"x": kinds, "text": text, "list": [[float(k)] * 8 for k in kinds]})
        pq.write_table(table, folder / f"{i:04d}.parquet", row_group_size=groups)
    return folder


def main(budget_bytes: int, steps: int) -> None:
    about = machine(1)
    window_bytes = budget_bytes // 16
    kinds: dict[str, Callable[[Path], ParquetSource]] = {
        "floats": lambda p: parquet(floats(p, 8, 60_000, 4001), **sizes),
        "dictionaries": lambda p: parquet(repeats(p, 12, 200_000, 20_011), **sizes),
        "tripled": lambda p: parquet(floats(p, 8, 40_000, 4001), transform=tripled, **sizes),
        "small files": lambda p: parquet(floats(p, 900, 500, 77), **sizes),
    }
    sizes: Any = {"window_bytes": window_bytes, "prefetch_bytes": budget_bytes}
    results: dict[str, str] = {}
    with storage_directory() as place:
        for name, source_of in kinds.items():
            source = source_of(place / name)
            with own_ray(4 * budget_bytes, place / "ray"):
                used_bytes = slow_consumer(source, steps)
            results[name] = f"{used_bytes / budget_bytes:.2f} of the budget"
            console.print(f"{name}: {results[name]}")
    report("Peak of the object store", ("data", "peak"), list(results.items()))
    setting = f"prefetch_bytes {budget_bytes / 2**20:.0f} MiB, {steps} steps {SLOWER} times slower"
    record("feed_memory", about=about, setting=setting, results=results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-mb", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    main(options.budget_mb * 2**20, options.steps)
