"""What a killed driver leaves of the Ray that it has started is ended, and nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE_S = 60.0
DRIVER = """
import sys, time
from elastic.on_ray.driver.remnants import Remnants
remnants = Remnants(sys.argv[1], sys.argv[2])
if sys.argv[3:]:
    remnants.close()
print(remnants._process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def start():
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def await_end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.wait(PATIENCE_S)


def test_programs_of_its_session_are_ended_and_others_are_not(tmp_path: Path, start):
    session, ray = tmp_path / "session_1_2", tmp_path / "ray"
    (ray / "dashboard").mkdir(parents=True)
    agent, elsewhere = ray / "dashboard" / "agent.py", tmp_path / "agent.py"
    agent.write_text("import time; time.sleep(600)")
    shutil.copy(agent, elsewhere)
    left = [
        start(sys.executable, "-u", str(agent), f"--session-dir={session}"),
        start(sys.executable, str(agent), f"--log-dir={session}/logs"),
    ]
    others = [
        start(sys.executable, str(agent), f"--session-dir={session}0"),
        start(sys.executable, str(elsewhere), f"--log-dir={session}/logs"),
    ]
    driver = start(sys.executable, "-c", DRIVER, str(session), str(ray))
    assert driver.stdout is not None
    watch = int(driver.stdout.readline())
    driver.kill()
    await_end(*left)
    assert [process.returncode for process in left] == [-signal.SIGKILL] * 2
    assert [process.poll() for process in others] == [None, None]
    deadline = time.monotonic() + PATIENCE_S
    while os.path.exists(f"/proc/{watch}") and time.monotonic() < deadline:
        time.sleep(0.02)  # polling, bounded by the deadline
    assert not os.path.exists(f"/proc/{watch}")


def test_it_goes_with_a_ray_that_was_shut_down(tmp_path: Path, start):
    driver = start(sys.executable, "-c", DRIVER, str(tmp_path / "s"), str(tmp_path), "close")
    assert driver.stdout is not None
    assert not os.path.exists(f"/proc/{int(driver.stdout.readline())}")
