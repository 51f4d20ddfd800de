"""What the feed takes of Ray's object store, and how its windows get to consumers of any pace."""

import os
import signal
import time
from contextlib import closing

import numpy as np
import pytest
import ray

from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.on_ray.feed.client import RayFeed
from elastic.on_ray.feed.order import FeedOrder
from elastic.on_ray.feed.start import feed_name
from elastic.on_ray.naming import NAMESPACE
from elastic.protocol.errors import BadData
from tests.bench.feed_memory import feed_of, floats, own_ray, repeats, slow_consumer, tripled
from tests.cluster.live import environment
from workers.data.parquet_loader import ParquetLoader

pytestmark = pytest.mark.cluster
MiB = 2**20
MICRO_BATCH, V, STEPS = 16, 6, 120


@pytest.fixture
def one_node(ray_temp, monkeypatch):
    """This process is a driver; the store is a little larger than the budgets."""
    for name, value in environment(ray_temp).items():
        monkeypatch.setenv(name, value)
    with own_ray(100 * MiB):
        yield


@pytest.fixture
def forking_node(start_head):
    """As one_node, with workers that are forked."""
    cluster = start_head(num_cpus=2, object_store_memory=100 * MiB)
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("kind", ["dictionaries", pytest.param("tripled", marks=pytest.mark.slow)])
def test_a_slow_consumer_keeps_the_store_within_the_budget(one_node, tmp_path, kind):
    """tests/bench/feed_memory.py has more kinds, and a real budget."""
    sizes = {"window_bytes": MiB // 4, "prefetch_bytes": 16 * MiB}
    if kind == "tripled":
        source = parquet(floats(tmp_path / "set", 4, 20_000, 501), transform=tripled, **sizes)
    else:
        source = parquet(repeats(tmp_path / "set", 4, 40_000, 2003), **sizes)
    assert 4 * MiB < slow_consumer(source, 40) <= source.prefetch_bytes


@pytest.mark.slow
def test_a_budget_larger_than_the_store_is_cut(one_node, tmp_path):
    folder = floats(tmp_path / "set", 4, 20_000, 2001)
    source = parquet(folder, window_bytes=2 * MiB, prefetch_bytes=1024 * MiB)
    assert 30 * MiB < slow_consumer(source, 60) <= 50 * MiB


class Consumer:
    """One of several, each with a pace of its own."""

    def rows(self, order: FeedOrder, rank: int, pause_s: float) -> list[list[int]]:
        """The row ids of each step's micro-batches of this rank."""
        sizes = {"global_batch": MICRO_BATCH * V, "micro_batch": MICRO_BATCH}
        loader = ParquetLoader(RayFeed(order), seed=0, **sizes)
        ids = range(2 * rank, 2 * rank + 2)
        used = []
        with closing(loader):
            loader.assign(0, ids)
            for step in range(STEPS):
                time.sleep(pause_s)  # the consumer's work
                used.append([r for i in ids for r in loader.next(step, i, never).rows.tolist()])
        return used


def never() -> bool:
    return False


def test_consumers_far_apart_get_every_window(forking_node, tmp_path):
    """Windows are forgotten and read again under those who are behind. A consumer waited for ever:
    Ray had lost count of who holds a reference."""
    folder = floats(tmp_path / "set", 8, 2000, 250)
    source = parquet(folder, window_bytes=70_000, prefetch_bytes=500_000)
    with feed_of(source, "paces") as order:
        actors = [ray.remote(Consumer).options(num_cpus=0).remote() for _ in range(V // 2)]
        paces = [0.0, 0.01, 0.03]
        asked = [a.rows.remote(order, r, paces[r]) for r, a in enumerate(actors)]
        found = ray.get(asked, timeout=110)
        for actor in actors:
            ray.kill(actor)
    used = np.concatenate([part for parts in zip(*found, strict=True) for part in parts])
    plan = make_plan(source, 0)
    rows = np.concatenate([read_window(plan, 0, w)[0].ids for w in range(len(plan.windows(0)))])
    assert used.tolist() == rows[: STEPS * MICRO_BATCH * V].tolist()


def deadly(table):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_window_that_ends_each_process_is_named(one_node, tmp_path):
    """Ray alone would begin it for ever."""
    folder = floats(tmp_path / "set", 1, 2000, 250)
    with feed_of(parquet(folder, transform=deadly), "deadly") as order:
        what = r"row group \d.*: the process that reads it was killed or crashed 4 times"
        with pytest.raises(BadData, match=what):
            RayFeed(order).window_at(0, 0, never)


@pytest.mark.slow
def test_a_feed_that_ray_has_given_up_is_started_again(one_node, tmp_path):
    folder = floats(tmp_path / "set", 1, 2000, 250)
    with feed_of(parquet(folder, window_bytes=70_000), "given-up") as order:
        feed = RayFeed(order)
        before = feed.window_at(0, 0, never)
        ray.kill(ray.get_actor(feed_name("given-up"), namespace=NAMESPACE), no_restart=True)
        assert feed.window_at(before.end, 0, never).first == before.end
