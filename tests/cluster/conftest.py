"""Fixtures of the suites that start Ray."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from xdist.scheduler import LoadScopeScheduling

from tests.cluster.fork_client import ADDRESS
from tests.cluster.fork_server import ForkServer
from tests.cluster.forked_nodes import ForkedNodes
from tests.cluster.hosts import Forbidden
from tests.cluster.live import JOBS, LiveRun, environment
from tests.cluster.shared_head import UNPREPARED, SharedHead

SHARED_STEPS, HASHED_EVERY = 100, 10
SLOWEST = (
    *("test_submit", "test_stop", "test_stages", "test_first_week", "test_script"),
    *("test_autoscaling", "test_hangs", "test_spot", "test_hosts", "test_bits"),
    *("test_object_store", "test_checkpoints", "test_drain", "test_feed", "test_feed_nodes"),
    *("test_controller_death", "test_chaos", "test_scale", "test_readme", "test_sharded"),
    *("test_tune", "test_own_strategy", "test_script_in_place", "test_script_data"),
    *("test_stage_nodes", "test_hybrid", "test_feed_store", "test_partitions", "test_lifecycle"),
)
TOGETHER = {
    "test_submit": "jobs",
    **dict.fromkeys(("test_stop", "test_capacity", "test_devices"), "nodes"),
    **dict.fromkeys(("test_drain", "test_paths", "test_waiting"), "nodes"),
}
"""Modules whose tests share a cluster that takes long to start: one test process has them all."""


def pytest_collection_modifyitems(items):
    """The modules with the longest tests come first: at the end all test processes have work."""
    places = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(SLOWEST)))


class Together(LoadScopeScheduling):
    """One test after another to whoever is free, in their order, but those that stay together."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(Path(nodeid.partition("::")[0]).stem, nodeid)


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return Together(config, log)


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
    """of(steps=30, **options): hash and sample records of an uninterrupted run with one worker.

    All test processes share it. Shorter runs of Toy are the beginning of one.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    hashes = shared / "hashes"

    def of(
        steps: int = 30, *, job: str = "toy", target: str = "Hashed", **options
    ) -> tuple[str, list[str]]:
        is_hashed = target == "Hashed"
        is_part = is_hashed and steps <= SHARED_STEPS and steps % HASHED_EVERY == 0
        length, every = (SHARED_STEPS, HASHED_EVERY) if is_part else (steps, steps)
        name = "-".join([target, str(length), *(f"{k}-{v}" for k, v in sorted(options.items()))])
        folder = hashes / name
        assert "set" not in options, "the reference is Toy as it comes"
        with FileLock(shared / f"{name}.lock", timeout=300):
            folder.mkdir(parents=True, exist_ok=True)
            options |= {"workers": 1, "steps": length}
            if is_hashed:
                options |= {"eval_every": every, "set": [f"folder={str(folder)!r}"]}
            is_good = folder / "good"
            if not is_good.exists():
                options["address"] = request.getfixturevalue("shared_head").address
            run = LiveRun(f"{JOBS / job}.py:{target}", shared, name, ray_temp, **options)
            if not is_good.exists():
                with run:
                    end = run.finish()
                assert end["status"] == 0, end["err"]
                sha256 = end["result"]["weights_sha256"]
                assert not is_hashed or (folder / str(length)).read_text() == sha256
                (folder / str(length)).write_text(sha256)
                is_good.touch()
        samples = [s["sha256"] for s in run.lines("samples.jsonl")]
        return (folder / str(steps)).read_text(), samples[:steps]

    return of


def set_environment(patch: pytest.MonkeyPatch, temp: Path) -> None:
    """Of Ray's nodes that are started here."""
    for name, value in (environment(temp) | UNPREPARED).items():
        patch.setenv(name, value)


def new_head(num_cpus: int, object_store_memory: int = 10**8) -> ForkedNodes:
    options = {"num_cpus": num_cpus, "object_store_memory": object_store_memory}
    head = {"include_dashboard": False, **options}
    return ForkedNodes(initialize_head=True, head_node_args=head)


@pytest.fixture
def start_head(fork_server, ray_temp, monkeypatch):
    """start_head(num_cpus) -> a Ray head of the test's own."""
    set_environment(monkeypatch, ray_temp)
    made = []

    def make(*args, **options) -> ForkedNodes:
        made.append(new_head(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture(scope="session")
def head_without_slots(fork_server, ray_temp):
    """The tests of a process share it, as they do the one with slots."""
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, ray_temp)
        found = new_head(num_cpus=0)
    yield found
    found.shutdown()


@pytest.fixture
def nodes(head_without_slots, ray_temp, monkeypatch):
    """A head without slots, to which a test adds nodes. They go with the test."""
    set_environment(monkeypatch, ray_temp)
    yield head_without_slots
    head_without_slots.remove_nodes()


@pytest.fixture
def machine(start_head):
    """A head that has slots: a test may crash it."""
    found = start_head(num_cpus=4)
    yield found
    found.crash()


@pytest.fixture
def hosts(request, fork_server):
    """Those of the module's HOSTS; skips where this machine forbids it."""
    try:
        made = request.module.HOSTS().__enter__()
    except Forbidden as reason:
        pytest.skip(f"no hosts on this machine: {reason}")
    yield made
    made.__exit__()
