"""Fixtures of the suites that start Ray."""

import shutil
import tempfile
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.cluster.hosts import Forbidden
from tests.cluster.live import JOBS, LiveRun, environment


@pytest.fixture(scope="session")
def ray_temp():
    """Ray's sockets need short paths."""
    path = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(tmp_path, ray_temp):
    """start("Class", name, **options) -> LiveRun (a context manager)."""

    def make(target: str, name: str = "run", **options) -> LiveRun:
        return LiveRun(f"{JOBS / 'toy.py'}:{target}", tmp_path, name, ray_temp, **options)

    return make


@pytest.fixture(scope="session")
def reference(tmp_path_factory, ray_temp):
    """The uninterrupted run with one worker: hash and sample records, by its options."""
    known = {}

    def of(target: str, **options):
        key = (target, tuple(sorted((k, str(v)) for k, v in options.items())))
        if key not in known:
            storage = tmp_path_factory.mktemp("reference")
            place = f"{JOBS / 'toy.py'}:{target}"
            with LiveRun(place, storage, "run", ray_temp, workers=1, **options) as run:
                end = run.finish()
                assert end["status"] == 0, end["err"]
                samples = [s["sha256"] for s in run.lines("samples.jsonl")]
                known[key] = (end["result"]["weights_sha256"], samples)
        return known[key]

    return of


@pytest.fixture
def nodes(ray_temp, monkeypatch):
    """A head without slots, to which a test adds nodes."""
    for name, value in environment(ray_temp).items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    found = Cluster(initialize_head=True, head_node_args=head)
    yield found
    found.shutdown()


@pytest.fixture
def hosts(request):
    """Those of the module's HOSTS; skips where this machine forbids it."""
    try:
        made = request.module.HOSTS().__enter__()
    except Forbidden as reason:
        pytest.skip(f"no hosts on this machine: {reason}")
    yield made
    made.__exit__()
