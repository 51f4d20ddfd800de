"""Fixtures of the suites that start Ray."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.cluster.fork_server import ADDRESS, ForkServer
from tests.cluster.forked_nodes import ForkedNodes
from tests.cluster.hosts import Forbidden
from tests.cluster.live import JOBS, LiveRun, environment
from tests.cluster.shared_head import UNPREPARED, SharedHead

SHARED_STEPS, HASHED_EVERY = 200, 10
SLOWEST = (
    *("test_readme", "test_sharded", "test_bits", "test_feed", "test_stages", "test_object_store"),
    *("test_submit", "test_drain", "test_checkpoints", "test_hosts", "test_hangs", "test_spot"),
    *("test_autoscaling", "test_scale"),
)


def pytest_collection_modifyitems(items):
    """The modules with the longest tests come first: at the end all test processes have work."""
    places = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(SLOWEST)))


@pytest.fixture(scope="session")
def ray_temp():
    """Ray's sockets need short paths."""
    path = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def fork_server():
    """Each test process has one; who forks finds it in the environment."""
    server = ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS, server.address)
        yield server
    server.close()


@pytest.fixture(scope="session")
def shared_head(fork_server):
    head = SharedHead(fork_server)
    yield head
    head.close()


@pytest.fixture
def start(request, tmp_path, ray_temp):
    """start("Class", name, **options) -> LiveRun (a context manager), on the shared head.

    job: the file of tests/cluster/jobs that has the class. address: "local" for a Ray of its own,
    which a test needs that looks into Ray's files, or harms a process of Ray's.
    """

    heads: set[SharedHead] = set()

    def make(target: str, name: str = "run", *, job: str = "toy", **options) -> LiveRun:
        if "address" not in options:
            head = request.getfixturevalue("shared_head")
            heads.add(head)
            options["address"] = head.address
        return LiveRun(f"{JOBS / job}.py:{target}", tmp_path, name, ray_temp, **options)

    yield make
    for head in heads:
        head.assert_empty()


@pytest.fixture(scope="session")
def reference(request, tmp_path_factory, ray_temp):
    """of(steps=30, **options): hash and sample records of Toy's uninterrupted run with one worker.

    Shorter runs are the beginning of one that all test processes share.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    hashes = shared / "hashes"

    def of(steps: int = 30, **options) -> tuple[str, list[str]]:
        is_part = steps <= SHARED_STEPS and steps % HASHED_EVERY == 0
        length, every = (SHARED_STEPS, HASHED_EVERY) if is_part else (steps, steps)
        name = "-".join(["run", str(length), *(f"{k}-{v}" for k, v in sorted(options.items()))])
        folder = hashes / name
        assert "set" not in options, "the reference is Toy as it comes"
        with FileLock(shared / f"{name}.lock", timeout=300):
            folder.mkdir(parents=True, exist_ok=True)
            options |= {"workers": 1, "steps": length, "eval_every": every}
            options["set"] = [f"folder={str(folder)!r}"]
            is_good = folder / "good"
            if not is_good.exists():
                options["address"] = request.getfixturevalue("shared_head").address
            run = LiveRun(f"{JOBS / 'toy.py'}:Hashed", shared, name, ray_temp, **options)
            if not is_good.exists():
                with run:
                    end = run.finish()
                assert end["status"] == 0, end["err"]
                assert (folder / str(length)).read_text() == end["result"]["weights_sha256"]
                is_good.touch()
        samples = [s["sha256"] for s in run.lines("samples.jsonl")]
        return (folder / str(steps)).read_text(), samples[:steps]

    return of


@pytest.fixture
def nodes(fork_server, ray_temp, monkeypatch):
    """A head without slots, to which a test adds nodes."""
    for name, value in (environment(ray_temp) | UNPREPARED).items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
    found = ForkedNodes(initialize_head=True, head_node_args=head)
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
