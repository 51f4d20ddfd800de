"""What is left of memory, by node and by container."""

import os

import pytest

from workers.health.memory import memory_of

GB = 2**30


@pytest.fixture
def groups(tmp_path):
    """groups(controllers, {path: (limit, usage, cache)}) -> a root like /sys/fs/cgroup."""

    def make(names, limits):
        for path, (limit, usage, cache) in limits.items():
            folder = tmp_path / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{usage}\n")
            (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cache}\n")
        return tmp_path

    return make


@pytest.fixture
def inside(monkeypatch):
    """inside(text): what /proc/PID/cgroup says of this process."""

    def make(text):
        from workers.health import memory

        def read_text(path, *_):
            return text if str(path).endswith("/cgroup") else real(path)

        real = memory.Path.read_text
        monkeypatch.setattr(memory.Path, "read_text", read_text)

    return make


def test_a_process_and_its_node(tmp_path):
    resident, left = memory_of(os.getpid(), tmp_path)
    assert 10**6 < resident < 100 * GB
    assert left > 10**6


def test_the_smallest_container_around_it_counts(groups, inside):
    v2 = ("memory.max", "memory.current", "inactive_file")
    root = groups(v2, {"pod": (1000, 900, 300), "pod/box": ("max", 10, 0)})
    inside("0::/pod/box\n")
    assert memory_of(os.getpid(), root)[1] == 400


def test_the_older_layout_too(groups, inside):
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root = groups(v1, {"memory": (5000, 1, 0), "memory/box": (1000, 990, 0)})
    inside("5:cpu:/box\n4:memory:/box\n")
    assert memory_of(os.getpid(), root)[1] == 10


def test_a_process_that_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        memory_of(2**22 + 1, tmp_path)
