"""Of the Ray that a killed driver has started its agents are ended, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from elastic.on_ray.driver.remnants import lives, stat_of

PATIENCE_S = 60.0
RAYLET = """
import subprocess, sys, time
for name in ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::Worker"):
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", name]).pid)
print(flush=True)
time.sleep(600)
"""
DRIVER = """
import subprocess, sys, time
from elastic.on_ray.driver.remnants import Remnants
command = [sys.executable, "-c", "import time; time.sleep(600)", "my own agent"]
pids = [subprocess.Popen(command).pid]  # the user's own
raylet = subprocess.Popen([sys.executable, "-c", sys.argv[1], "raylet"], stdout=subprocess.PIPE)
pids += [raylet.pid, *(int(raylet.stdout.readline()) for _ in range(3))]
remnants = Remnants()
if sys.argv[2:]:
    remnants.close()
print(remnants._process.pid, *pids, flush=True)
time.sleep(600)
"""


def start_driver(*words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """And the pids of the watch, the user's process, the raylet, two agents and a worker."""
    command = [sys.executable, "-c", DRIVER, RAYLET, *words]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, [int(pid) for pid in driver.stdout.readline().split()]


def is_running(pid: int) -> bool:
    fields = stat_of(pid)
    return fields is not None and fields[0] not in "ZX"


def await_end(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)  # polling, bounded by the deadline
    assert not any(map(is_running, pids))


def test_agents_are_ended_and_other_processes_are_not():
    driver, (watch, own, raylet, *agents, worker) = start_driver()
    try:
        driver.kill()
        driver.wait()
        await_end(watch, *agents)
        assert [is_running(pid) for pid in (own, raylet, worker)] == [True] * 3
    finally:
        for pid in filter(is_running, (own, raylet, *agents, worker)):
            os.kill(pid, signal.SIGKILL)


def test_the_watch_goes_with_a_ray_that_was_shut_down():
    driver, (watch, *others) = start_driver("close")
    assert not Path(f"/proc/{watch}").exists()
    driver.kill()
    driver.wait()
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_another_process_of_the_same_number_is_none_of_them():
    fields = stat_of(os.getpid())
    assert fields is not None
    assert lives(os.getpid(), int(fields[19]))
    assert not lives(os.getpid(), int(fields[19]) - 1)
