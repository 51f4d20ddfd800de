"""The feed on several nodes, one of which dies with what it has read and is reading."""

from contextlib import closing

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.data.reading import read_window
from elastic.on_ray.feed.client import RayFeed
from elastic.on_ray.feed.order import FeedOrder
from elastic.on_ray.feed.start import end_feed, feed_name
from elastic.on_ray.naming import NAMESPACE
from workers.data.parquet_loader import ParquetLoader

pytestmark = pytest.mark.cluster
FILES, ROWS_PER_FILE, WIDTH = 24, 40, 10_000  # 400 kB a row group: too large to travel inline
MICRO_BATCH, V = 5, 4
BATCH = MICRO_BATCH * V
STORE_BYTES = 200 * 2**20


class Controller:
    """A feed ends itself without one."""

    def note(self, fields):
        raise AssertionError(fields)


@pytest.fixture
def two_nodes(start_head):
    """A head, and a node that may be lost; this process is a driver."""
    cluster = start_head(num_cpus=2, object_store_memory=STORE_BYTES)
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    yield cluster, node
    end_feed("nodes")
    ray.shutdown()


@pytest.fixture
def source(tmp_path):
    for i in range(FILES):
        rows = np.arange(i * ROWS_PER_FILE, (i + 1) * ROWS_PER_FILE)
        content = np.repeat(rows.astype(np.uint8), WIDTH)
        table = {"row": rows, "content": pa.FixedSizeListArray.from_arrays(content, WIDTH)}
        pq.write_table(pa.table(table), tmp_path / f"{i:02d}.parquet")
    return parquet(tmp_path, window_bytes=1, prefetch_bytes=8 * 2**20, max_reads=4)


def used_rows(loader, cluster, node):
    """Two epochs; on the way the node is lost, and then the feed with all that it owns."""
    used = []
    loader.assign(0, range(V))
    for step in range(2 * FILES * ROWS_PER_FILE // BATCH):
        for i in range(V):
            loaded = loader.next(step, i, lambda: False)
            used += loaded.rows.tolist()
            assert (loaded.batch["content"][:, -1].numpy() == loaded.rows.astype(np.uint8)).all()
        if step == 10:
            cluster.remove_node(node, allow_graceful=False)
        if step == 60:
            actor = ray.get_actor(feed_name("nodes"), namespace=NAMESPACE)
            ray.kill(actor, no_restart=False)
    return used


def test_a_node_that_dies_takes_no_row_along(two_nodes, source, tmp_path):
    cluster, node = two_nodes
    _controller = ray.remote(Controller).options(name="nodes-controller", num_cpus=0).remote()
    order = FeedOrder(
        run_id="nodes",
        source=cloudpickle.dumps(source),
        workload=b"",
        folder=None,
        seed=5,
        place=str(tmp_path / "nowhere"),
    )
    feed = RayFeed(order)
    loader = ParquetLoader(feed, seed=5, global_batch=BATCH, micro_batch=MICRO_BATCH)
    with closing(loader):
        used = used_rows(loader, cluster, node)
    plan = make_plan(source, 5)
    windows = [(e, w) for e in range(2) for w in range(len(plan.windows(e)))]
    assert used == np.concatenate([read_window(plan, e, w)[0].ids for e, w in windows]).tolist()
    actor = ray.get_actor(feed_name("nodes"), namespace=NAMESPACE)
    assert ray.get(actor.held_bytes.remote(), timeout=30) <= source.prefetch_bytes
