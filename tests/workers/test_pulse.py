"""The pulse, a process of its own, and its controller at the other end."""

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from multiprocessing.connection import Connection
from typing import NoReturn

import pytest

from elastic.protocol import wire
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.pulse import KILLED, Heartbeat
from workers.health import pulse
from workers.health.stacks import Armed
from workers.health.unanswered import Unanswered
from workers.health.vitals import Vitals


@contextmanager
def beating(
    controller: socket.socket, lease_s: float = 30.0, interval_s: float = 0.05
) -> Iterator["subprocess.Popen[bytes]"]:
    vitals = Vitals()
    armed = Armed(os.memfd_create("stacks", 0), os.pipe()[1])
    child = pulse.start(
        vitals.fd,
        armed,
        3,
        controller.getsockname(),
        "secret",
        interval_s=interval_s,
        silence_s=0.3,
        lease_s=lease_s,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def heard(listener: socket.socket) -> list[str]:
    """The first two frames of who dials."""
    listener.settimeout(60)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        frames = [wire.receive(connection)[0] for _ in range(2)]
    assert frames[0]["worker"] == 3
    return [frame["type"] for frame in frames]


def test_a_pulse_dials_the_successor_at_the_same_address():
    with socket.create_server(("127.0.0.1", 0)) as listener, beating(listener):
        address = listener.getsockname()
        assert heard(listener) == ["Hello", "Heartbeat"]
        listener.close()
        with socket.create_server(address) as successor:
            assert heard(successor) == ["Hello", "Heartbeat"]


def test_a_pulse_ends_itself_when_no_controller_comes():
    with socket.create_server(("127.0.0.1", 0)) as listener, beating(listener, 0.5) as child:
        assert heard(listener) == ["Hello", "Heartbeat"]
        listener.close()
        assert child.wait(60) == 0


def test_a_heartbeat_says_for_how_long_its_process_has_been_stopped():
    child = subprocess.Popen(["sleep", "60"])
    observed = pulse.Observed(3, child.pid, Vitals().fd, 0.05)
    try:
        assert observed.look().stopped_s == 0.0
        os.kill(child.pid, signal.SIGSTOP)
        while observed.look().process_state != "T":
            pass
        found = [observed.look().stopped_s for _ in range(1000)]
        assert 0 < found[-1] < 60
        assert found == sorted(found)
        os.kill(child.pid, signal.SIGCONT)
        while observed.look().process_state == "T":
            pass
        assert observed.look().stopped_s == 0.0
    finally:
        child.kill()
        child.wait()


def hold_memory(listener: socket.socket) -> None:
    """As a worker that beats once an hour and has half a GB to be freed."""
    memory = mmap(-1, 2**29)
    for page in range(0, len(memory), 4096):
        memory[page] = 1
    with beating(listener, lease_s=9999.0, interval_s=3600.0):
        signal.pause()


def test_a_worker_that_a_signal_ends_is_dead_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        worker = multiprocessing.get_context("fork").Process(target=hold_memory, args=(listener,))
        worker.start()
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(60)
        assert wire.receive(connection)[0]["type"] == "Hello"
        assert wire.receive(connection)[0]["process_state"] != KILLED
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert wire.receive(connection)[0]["process_state"] == KILLED
        assert connection.recv(1) == b""  # and its pulse ends with it
    worker.join()


def leave_pulse(listener: socket.socket, told: Connection) -> None:
    """As a worker that is killed while its pulse is only being started."""
    with beating(listener) as child:
        child.send_signal(signal.SIGSTOP)
        told.send(child.pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_pulse_whose_worker_is_gone_before_it_has_begun_beats_for_nobody_else():
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        told, tells = fork.Pipe(duplex=False)
        worker = fork.Process(target=leave_pulse, args=(listener, tells))
        worker.start()
        pid = told.recv()
        worker.join()
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 120
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)  # polling, bounded by the deadline
        assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return pulse.state_of(pid) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


BEAT = Heartbeat(3, 1, 1, "compute", 0.1, None, False, "R")


def silent(_: object) -> NoReturn:
    raise AssertionError("nothing is asked")


class Waiting:
    """A connection on which nothing is answered."""

    def look(self, connection: socket.socket, now: float) -> float:
        return 9.0


def test_a_pulse_that_is_unanswered_keeps_its_connection_until_there_is_another():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = pulse.Line(listener.getsockname(), Hello("secret", 3, "pulse"), 0.05, 0.3)
        line.beat(BEAT, silent, lambda: False)
        first, _ = listener.accept()
        assert [wire.receive(first)[0]["type"] for _ in range(2)] == ["Hello", "Heartbeat"]
        line._unanswered = Waiting()  # pyright: ignore[reportAttributeAccessIssue]
        line.beat(BEAT, silent, lambda: False)
        assert wire.receive(first)[0]["type"] == "Heartbeat"
        second, _ = listener.accept()
        assert first.recv(1) == b""
    line.beat(BEAT, silent, lambda: False)  # nobody listens now
    line.beat(BEAT, silent, lambda: False)
    expected = ["Hello", "Heartbeat", "Heartbeat"]
    assert [wire.receive(second)[0]["type"] for _ in range(3)] == expected
    first.close()
    second.close()


def test_a_connection_that_is_answered_has_waited_for_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.send(b"x")
            unanswered = Unanswered()
            assert [unanswered.look(connection, now) for now in (1.0, 9.0)] == [0.0, 0.0]
        with pytest.raises(OSError, match="descriptor"):
            unanswered.look(connection, 10.0)
