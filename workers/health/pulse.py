"""The pulse: a tiny child process that tells the controller how its worker does.

It needs neither the worker's GIL nor torch, so a hang, a held GIL and a frozen process are all
seen from outside, and asked where they are. Standard library and elastic.protocol only; started
by file name.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from mmap import PROT_READ, mmap
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic.protocol import wire
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.pulse import (
    KILLED,
    TO_PULSE,
    Heartbeat,
    OwnPart,
    Question,
    ReachAsked,
    Reached,
    Stacks,
    StacksAsked,
)
from workers.health.dialling import reached
from workers.health.memory import memory_of
from workers.health.stacks import Armed, Fate, collect, state_of
from workers.health.unanswered import Silences, Unanswered
from workers.health.vitals import COLLECTIVES, ENOUGH, LAYOUT, PHASES, WAITING

STOPPED = "T"
LOOK_S = 0.05
"""Between two looks whether a signal has ended the worker. Its connections end once its memory is
freed, which takes the kernel 0.3 s for 4 GB, and seconds on a busy machine."""
TRIES = 5
"""To dial, in the time between two heartbeats, while nobody listens."""
DIAL_S = 0.5
PATIENCE = 10
"""Heartbeats; so long the other end may take nothing."""


def start(
    vitals: int,
    armed: Armed,
    worker: int,
    controller: tuple[str, int],
    token: str,
    *,
    interval_s: float,
    silence_s: float,
    lease_s: float,
) -> "subprocess.Popen[bytes]":
    """Start the pulse of this process; it ends soon after it.

    vitals: their file. silence_s: after so long without an answer it
    dials again, instead of waiting for TCP, which tries less and less often. lease_s: so long it
    dials a controller that has gone: its successor comes to the same address if it can, and a
    worker that is frozen cannot tell of another one.
    """
    fds = (vitals, *armed)
    arguments = (*fds, os.getpid(), worker, *controller, interval_s, silence_s, lease_s)
    child = subprocess.Popen(
        [sys.executable, "-S", __file__, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(token.encode())  # not in the command line, which every user can read
    child.stdin.close()
    return child


def read_vitals(memory: mmap, worker: int) -> Heartbeat:
    """What the worker itself shows of it."""
    while True:
        before, generation, step, phase, since, p95, num_seen, *others = LAYOUT.unpack_from(
            memory, 0
        )
        after = LAYOUT.unpack_from(memory, 0)[0]
        if before and before == after and not before & 1:
            break
    number, collective, size, part, own_steps, own_s, data_s = others
    return Heartbeat(
        worker=worker,
        generation=generation,
        step=step,
        phase=PHASES[phase],
        phase_s=round(time.monotonic() - since, 4),
        p95_s=None if p95 < 0 else p95,
        waits_for_peers=PHASES[phase] in WAITING,
        process_state="",
        collective=(number, COLLECTIVES[collective], size),
        own=OwnPart(own_steps, round(own_s, 6), round(data_s, 6)),
        is_new_there=num_seen < ENOUGH,
        part=part.rstrip(b"\0").decode(errors="replace"),
    )


class Observed:
    """What can be seen of the worker from outside."""

    def __init__(self, worker: int, pid: int, vitals: int, interval_s: float) -> None:
        self._worker, self._pid, self._interval_s = worker, pid, interval_s
        self._fate = Fate(pid)
        self._memory, self._silences = mmap(vitals, 4096, prot=PROT_READ), Silences()
        self._stopped_since: float | None = None

    def look(self) -> Heartbeat:
        shown = read_vitals(self._memory, self._worker)
        if self._fate.is_killed():
            return replace(shown, process_state=KILLED)
        now, process_state = time.monotonic(), state_of(self._pid)
        unanswered: dict[str, float] = {}
        if shown.waits_for_peers and shown.phase_s > self._interval_s:
            unanswered = self._silences.look(self._pid, now)
        else:
            self._silences.forget()
        self._stopped_since = (self._stopped_since or now) if process_state == STOPPED else None
        return replace(
            shown,
            process_state=process_state,
            unanswered=tuple(unanswered.items()),
            stopped_s=round(now - self._stopped_since, 3) if self._stopped_since else 0.0,
            memory=memory_of(self._pid),
        )

    def has_news(self, told: Heartbeat) -> bool:
        """Of this process's parent: it is gone, or was killed since."""
        is_told = told.process_state == KILLED
        return os.getppid() != self._pid or (not is_told and self._fate.is_killed())


class Line:
    """The connection to the controller, dialled again when it is broken or unanswered."""

    def __init__(
        self,
        controller: tuple[str, int],
        hello: Hello,
        interval_s: float,
        silence_s: float,
    ) -> None:
        self._controller, self._hello = controller, hello
        self._interval_s, self._silence_s = interval_s, silence_s
        self._unanswered = Unanswered()
        self._connection: socket.socket | None = None
        self.heard_at = time.monotonic()
        """When somebody was last at the other end."""

    def beat(
        self,
        heartbeat: Heartbeat,
        answer: Callable[[Question], Stacks | Reached],
        has_news: Callable[[], bool],
    ) -> None:
        """Say how the worker does, and answer what is asked until the next heartbeat is due, or
        `has_news`."""
        try:
            connection = self._connection = self._connection or self._dialled()
            connection.sendall(pack(heartbeat))
            self.heard_at = time.monotonic()
            if self._is_asked(connection, has_news):
                question = TO_PULSE.read(*wire.receive(connection))
                connection.sendall(pack(answer(question)))
            if self._unanswered.look(connection, time.monotonic()) > self._silence_s:
                self._renew(connection)
        except OSError:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            time.sleep(self._interval_s / TRIES)

    def _is_asked(self, connection: socket.socket, has_news: Callable[[], bool]) -> bool:
        """Waits for a question, until the next heartbeat."""
        questions = select.poll()  # select() takes the first 1,024 files of a process only
        questions.register(connection, select.POLLIN)
        due_at = time.monotonic() + self._interval_s
        while (left_s := due_at - time.monotonic()) > 0 and not has_news():
            if questions.poll(1000 * min(left_s, LOOK_S)):
                return True
        return False

    def _renew(self, connection: socket.socket) -> None:
        """Of no use, but not to be given up before there is another one."""
        with suppress(OSError):
            self._connection = self._dialled()
            connection.close()

    def _dialled(self) -> socket.socket:
        """Raises OSError."""
        connection = socket.create_connection(self._controller, timeout=DIAL_S)
        connection.settimeout(PATIENCE * self._interval_s)
        connection.sendall(pack(self._hello))
        return connection


def beat(
    vitals: int,
    armed: Armed,
    parent: int,
    worker: int,
    controller: tuple[str, int],
    token: str,
    *,
    interval_s: float,
    silence_s: float,
    lease_s: float,
) -> None:
    """parent: the worker's process, which may have gone by now. FileNotFoundError and
    ProcessLookupError then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    observed = Observed(worker, parent, vitals, interval_s)
    line = Line(controller, Hello(token, worker, "pulse"), interval_s, silence_s)
    while os.getppid() == parent and time.monotonic() - line.heard_at < lease_s:
        answer_to = partial(answer, parent=parent, armed=armed)
        told = observed.look()
        line.beat(told, answer_to, partial(observed.has_news, told))


def answer(question: Question, parent: int, armed: Armed) -> Stacks | Reached:
    match question:
        case StacksAsked(timeout_s):
            return Stacks(collect(parent, armed, timeout_s).encode())
        case ReachAsked(timeout_s, addresses):
            return Reached(tuple(sorted(reached(dict(addresses), timeout_s))))


if __name__ == "__main__":
    numbers, (host, port, interval_s, silence_s, lease_s) = sys.argv[1:6], sys.argv[6:]
    vitals, dump, bell, parent, worker = map(int, numbers)
    secret = sys.stdin.read()
    with suppress(FileNotFoundError, ProcessLookupError):  # the worker has gone
        beat(
            vitals,
            Armed(dump, bell),
            parent,
            worker,
            (host, int(port)),
            secret,
            interval_s=float(interval_s),
            silence_s=float(silence_s),
            lease_s=float(lease_s),
        )
