"""What the feed takes of Ray's object store, and how its windows get to consumers of any pace."""

import time

import cloudpickle
import pytest
import ray

from elastic.data import parquet
from elastic.data.footers import make_plan
from elastic.on_ray.actors import NAMESPACE
from tests.bench.feed_memory import feed_of, floats, peak_of, repeats, tripled
from tests.cluster.live import environment
from workers.fed_loader import FedLoader

pytestmark = pytest.mark.cluster
MiB = 2**20
MICRO_BATCH, V, STEPS = 16, 6, 120


@pytest.fixture(scope="module")
def one_node(ray_temp):
    """This process is a driver; the store is a little larger than the budgets."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(ray_temp).items():
            patch.setenv(name, value)
        options = {"object_store_memory": 100 * MiB, "log_to_driver": False, "num_cpus": 2}
        ray.init(address="local", include_dashboard=False, namespace=NAMESPACE, **options)
        yield
        ray.shutdown()


@pytest.mark.parametrize("kind", ["dictionaries", "tripled"])
def test_a_slow_consumer_keeps_the_store_within_the_budget(one_node, tmp_path, kind):
    """tests/bench/feed_memory.py has more kinds, and a real budget."""
    sizes = {"window_bytes": MiB, "prefetch_bytes": 16 * MiB}
    if kind == "tripled":
        source = parquet(floats(tmp_path / "set", 4, 20_000, 1001), transform=tripled, **sizes)
    else:
        source = parquet(repeats(tmp_path / "set", 4, 60_000, 5003), **sizes)
    use = peak_of(source, 40, kind)
    assert 4 * MiB < use.peak_bytes <= source.prefetch_bytes
    assert use.spilled_bytes == 0


class Consumer:
    """One of several, each with a pace of its own."""

    def rows(self, order: bytes, rank: int, pause_s: float) -> list[int]:
        loader = FedLoader(
            cloudpickle.loads(order)(), seed=0, global_batch=MICRO_BATCH * V, micro_batch=MICRO_BATCH
        )
        ids = range(2 * rank, 2 * rank + 2)
        loader.assign(0, ids)
        used = []
        for step in range(STEPS):
            time.sleep(pause_s)  # the consumer's work
            for i in ids:
                used += loader.next(step, i, lambda: False).rows.tolist()
        loader.close()
        return used
