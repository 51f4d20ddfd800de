"""Stacks of processes that hang in every way there is, taken from outside."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers.health.stacks import collect, state_of

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import re, sys, threading, time
from workers.health import stacks
fd = stacks.arm()
def background():
    time.sleep(600)
threading.Thread(target=background, daemon=True).start()
def ready():
    print(fd, flush=True)
"""
HANGS = {
    "waits": "def hang():\n    ready(); time.sleep(600)\nhang()",
    "burns": "def hang():\n    ready()\n    while True: pass\nhang()",
    "holds_the_gil": "def hang():\n    ready(); re.match('(a+)+$', 'a' * 60 + 'b')\nhang()",
    "deadlocks": "lock = threading.Lock()\ndef hang():\n"
    "    lock.acquire(); ready(); lock.acquire()\nhang()",
}
FORKS = (
    "def in_the_child():\n    ready(); time.sleep(600)\n"
    "def hang():\n    if os.fork() == 0:\n        in_the_child()\n    time.sleep(600)\n"
    "import os, subprocess\nsubprocess.Popen(['sleep', '600'])\nhang()"
)


@pytest.fixture
def hanging():
    """hanging("way") -> (process, the file of its stacks)."""
    made = []

    def make(way: str) -> tuple[subprocess.Popen, int]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + {**HANGS, "forks": FORKS}[way]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        fd = int(process.stdout.readline())
        return process, os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDONLY)

    yield make
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()  # children may hold the other end


@pytest.mark.parametrize("way", HANGS)
def test_every_thread_of_a_hanging_process_is_shown(hanging, way):
    process, fd = hanging(way)
    text = collect(process.pid, fd, timeout_s=5)
    assert "in hang" in text
    assert "in background" in text
    again = collect(process.pid, fd, timeout_s=5)
    assert again.count("in hang") == 1, "the second dump is its own"
    assert process.poll() is None


def test_the_stacks_of_forked_loaders_follow_and_other_children_are_left_alone(hanging):
    process, fd = hanging("forks")
    text = collect(process.pid, fd, timeout_s=5)
    first, second = text.split("forked from it:\n")
    assert "in hang" in first
    assert "in in_the_child" in second
    assert "in hang" in second, "it was forked there"
    assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    assert all(state_of(int(child)) == "S" for child in children)
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_a_stopped_process_shows_where_it_stood_and_stays_stopped(hanging):
    process, fd = hanging("waits")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    text = collect(process.pid, fd, timeout_s=5)
    assert text.startswith(f"process {process.pid} was stopped by a signal (state T), here:\n")
    assert "in hang" in text
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert state_of(process.pid) == "T"


def test_a_process_that_is_gone_is_said_to_be(hanging):
    process, fd = hanging("waits")
    process.kill()
    process.wait()
    assert collect(process.pid, fd, timeout_s=1) == f"process {process.pid} is gone\n"
