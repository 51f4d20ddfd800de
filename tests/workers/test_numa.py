"""Workers with a GPU run on the CPUs of its NUMA node, and never where they were not allowed to."""

import os
import threading

import pytest

from elastic.config import RunConfig
from elastic.controller.settings import worker_spec
from workers.health import numa

ADDRESS = "0000:3b:00.0"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("0-1,64-65", {0, 1, 64, 65}), ("\n", set())],
)
def test_linux_writes_cpus_as_spans(text, cpus):
    assert numa.parsed(text) == cpus
    assert numa.listed(cpus) == text.strip()


@pytest.mark.parametrize(
    ("allowed", "close", "chosen"),
    [
        (range(8), range(4), {0, 1, 2, 3}),
        (range(2, 8), range(4), None),  # two are too few: all of them stay
        (range(1, 8), range(4), {1, 2, 3}),
        (range(4, 8), range(4), None),  # the container has CPUs of the other node only
        (range(8), range(8), None),  # a machine of one node
        (range(3), range(4), None),  # somebody has bound it there already
        (range(8), (), None),  # Linux does not say
    ],
)
def test_what_is_allowed_is_only_ever_cut_down(allowed, close, chosen):
    assert numa.choose(allowed, close, 3) == chosen


def told(folder, text):
    (folder / ADDRESS).mkdir()
    (folder / ADDRESS / "local_cpulist").write_text(text)
    return folder


@pytest.mark.parametrize("text", [None, "", "mask"])
def test_a_device_of_which_linux_says_nothing_is_near_no_cpu(text, tmp_path):
    if text is not None:
        told(tmp_path, text)
    assert numa.near(ADDRESS, tmp_path) == set()


def found_in(*bodies):
    """What each thread may run on after its body, and a thread that it starts then; the thread of
    the first one is there before the second begins."""
    found = []

    def run(body):
        body()
        found.append(os.sched_getaffinity(0))
        child = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        child.start()
        child.join(10)

    for body in bodies:
        thread = threading.Thread(target=run, args=(body,))
        thread.start()
        thread.join(10)
    return found


def test_the_threads_that_are_started_afterwards_run_near_the_gpu_and_no_others(tmp_path, caplog):
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    told(tmp_path, f"{first}\n")
    caplog.set_level("INFO")
    found = found_in(lambda: numa.run_near(ADDRESS, 1, tmp_path), lambda: None)
    assert found == [{first}, {first}, allowed, allowed]
    (said,) = caplog.messages
    assert said == f"numa=bound gpu={ADDRESS} cpus={first} of={numa.listed(allowed)}"


def test_nothing_happens_where_too_few_cpus_are_near(tmp_path, caplog):
    allowed = os.sched_getaffinity(0)
    told(tmp_path, f"{min(allowed)}\n")
    caplog.set_level("INFO")
    assert found_in(lambda: numa.run_near(ADDRESS, 2, tmp_path)) == [allowed, allowed]
    assert caplog.messages == []


def test_it_is_a_setting_of_the_run():
    sizes = {"steps": 1, "global_batch": 1, "micro_batch": 1}
    order = {"run_id": "r", "token": "t", "device": "cuda", "folder": None}

    def spec_of(**settings):
        return worker_spec(RunConfig(**sizes, **settings), order, 0, ("127.0.0.1", 1), "/r")

    assert spec_of().cpus.numa_binding == "node"
    assert spec_of(numa_binding="none").cpus.numa_binding == "none"
    with pytest.raises(ValueError, match=r"numa_binding='socket' is unknown: choose one of node"):
        RunConfig(**sizes, numa_binding="socket")
