"""Stacks of processes that hang in every way there is, taken from outside."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.health.stacks import QUIET_S, Armed, collect, has_begun, read_when_whole, state_of

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import re, signal, sys, threading, time
from workers.health import stacks
armed = stacks.arm()
def background():
    time.sleep(600)
threading.Thread(target=background, daemon=True).start()
def ready():
    print(*armed, flush=True)
"""
HANGS = {
    "calls": "def calls(n):\n    return [calls(n - 1) for _ in 'ab'] if n else n\n"
    "def hang():\n    ready()\n    while True: calls(6)\nhang()",
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
    """hanging("way") -> (process, its files)."""
    made, opened = [], []

    def make(way: str) -> tuple[subprocess.Popen, Armed]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + {**HANGS, "forks": FORKS}[way]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        dump, bell = process.stdout.readline().split()
        opened.append(os.open(f"/proc/{process.pid}/fd/{dump}", os.O_RDONLY))
        opened.append(os.open(f"/proc/{process.pid}/fd/{bell}", os.O_WRONLY))
        return process, Armed(*opened[-2:])

    yield make
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()  # children may hold the other end
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("way", HANGS)
def test_every_thread_of_a_hanging_process_is_shown(hanging, way):
    process, armed = hanging(way)
    text = collect(process.pid, armed, timeout_s=PATIENCE_S)
    assert "in hang" in text
    assert "in background" in text
    again = collect(process.pid, armed, timeout_s=PATIENCE_S)
    assert again.count("in hang") == 1, "the second dump is its own"
    assert process.poll() is None


def test_a_process_that_calls_and_returns_all_the_time_survives_being_asked(hanging):
    """A dump by a signal that another thread handles has ended one with a segmentation fault."""
    process, armed = hanging("calls")
    for _ in range(300):
        before = os.fstat(armed.dump).st_size
        os.write(armed.bell, b"?")
        assert has_begun(armed.dump, before, PATIENCE_S)
    assert "in hang" in collect(process.pid, armed, PATIENCE_S)
    assert process.poll() is None


def test_the_stacks_of_forked_loaders_follow_and_other_children_are_left_alone(hanging):
    process, armed = hanging("forks")
    text = collect(process.pid, armed, timeout_s=PATIENCE_S)
    first, second = text.split("forked from it:\n")
    assert "in hang" in first
    assert "in in_the_child" in second
    assert "in hang" in second, "it was forked there"
    assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    deadline = time.monotonic() + PATIENCE_S
    while any(state_of(int(child)) != "S" for child in children):  # R: just after its dump
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling, bounded by the deadline
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def test_a_stopped_process_shows_where_it_stood_and_stays_stopped(hanging):
    process, armed = hanging("waits")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    text = collect(process.pid, armed, timeout_s=PATIENCE_S)
    assert text.startswith(f"process {process.pid} was stopped by a signal (state T), here:\n")
    assert "in hang" in text
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert state_of(process.pid) == "T"


def test_a_dump_of_a_process_that_just_does_not_run_is_waited_for(tmp_path):
    """Between two of its words it has no turn, for longer than a whole dump is quiet."""
    thread = 'Thread 0x2 (most recent call first):\n  File "a.py", line 1 in background\n'
    rest = '\nThread 0x1 (most recent call first):\n  File "a.py", line 9 in <module>\n'
    dump = tmp_path / "dump"
    dump.write_text(thread)

    def go_on():
        time.sleep(5 * QUIET_S)  # this is the fault
        with dump.open("a") as file:
            file.write(rest)

    with dump.open("rb") as file:
        process = threading.Thread(target=go_on)
        process.start()
        assert read_when_whole(file.fileno(), 0, PATIENCE_S) == thread + rest
        process.join(PATIENCE_S)


def test_a_process_that_is_gone_is_said_to_be(hanging):
    process, armed = hanging("waits")
    process.kill()
    process.wait()
    assert collect(process.pid, armed, timeout_s=1) == f"process {process.pid} is gone\n"
