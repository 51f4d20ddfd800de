"""The pulse: a tiny child process that tells the controller how its worker does.

It needs neither the worker's GIL nor torch, so a hang, a held GIL and a frozen process are all
seen from outside, and asked where they are. Standard library and elastic.protocol only; started
by file name.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic.protocol import wire
from workers.health.dialling import reached
from workers.health.memory import memory_of
from workers.health.stacks import collect, state_of
from workers.health.unanswered import Silences
from workers.health.vitals import COLLECTIVES, LAYOUT, PARTS, PHASES, WAITING

PR_SET_PDEATHSIG = 1


def start(
    fds: tuple[int, int],
    worker: int,
    controller: tuple[str, int],
    token: str,
    interval_s: float,
) -> "subprocess.Popen[bytes]":
    """Start the pulse of this process; it dies with it.

    fds: the files of its vitals and of its stacks.
    """
    arguments = (*fds, worker, *controller, interval_s)
    child = subprocess.Popen(
        [sys.executable, "-S", __file__, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(token.encode())  # not in the command line, which every user can read
    child.stdin.close()
    return child


def read_vitals(memory: mmap) -> dict[str, Any]:
    """The part of a heartbeat that the worker itself shows."""
    while True:
        before, generation, step, phase, since, p95, *others = LAYOUT.unpack_from(memory, 0)
        after = LAYOUT.unpack_from(memory, 0)[0]
        if before and before == after and not before & 1:
            break
    number, collective, size, part, which, own_steps, own_s = others
    return {
        "generation": generation,
        "step": step,
        "phase": PHASES[phase],
        "waits_for_peers": PHASES[phase] in WAITING,
        "phase_s": round(time.monotonic() - since, 4),
        "p95_s": None if p95 < 0 else p95,
        "collective": [number, COLLECTIVES[collective], size],
        "part": f"{PARTS[part]}{which}" if part else "",
        "own_steps": own_steps,
        "own_s": round(own_s, 6),
    }


def beat(
    fds: tuple[int, int],
    worker: int,
    controller: tuple[str, int],
    token: str,
    interval_s: float,
) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory, silences = mmap(fds[0], 4096, prot=PROT_READ), Silences()
    connection = connected(controller, 10 * interval_s)
    wire.send(connection, {"type": "hello", "role": "pulse", "worker": worker, "token": token})
    while os.getppid() == parent:
        state = {"process_state": state_of(parent), **read_vitals(memory)}
        state["memory"] = memory_of(parent)
        state["unanswered"] = {}
        if state["waits_for_peers"] and state["phase_s"] > interval_s:
            state["unanswered"] = silences.look(parent, time.monotonic())
        else:
            silences.forget()
        wire.send(connection, {"type": "heartbeat", "worker": worker, **state})
        if select.select([connection], [], [], interval_s)[0]:
            question, _ = wire.receive(connection)
            text = answer(question, parent, fds[1]).encode()
            wire.send(connection, {"type": question["type"]}, [memoryview(text)])


def connected(controller: tuple[str, int], timeout_s: float) -> socket.socket:
    """Exit status 2 if nobody is there: the worker may start another pulse."""
    try:
        return socket.create_connection(controller, timeout=timeout_s)
    except TimeoutError:
        sys.exit(2)


def answer(question: dict[str, Any], parent: int, stacks: int) -> str:
    """Where the worker's threads are, or which hosts can be reached from here."""
    timeout_s = question["timeout_s"]
    if question["type"] == "stacks":
        return collect(parent, stacks, timeout_s)
    addresses = {host: tuple(address) for host, address in question["addresses"].items()}
    return json.dumps(sorted(reached(addresses, timeout_s)))


if __name__ == "__main__":
    vitals, stacks, worker, host, port, interval = sys.argv[1:]
    secret = sys.stdin.read()
    try:
        beat((int(vitals), int(stacks)), int(worker), (host, int(port)), secret, float(interval))
    except (OSError, ConnectionError):
        sys.exit(0)  # the controller is gone or has closed us; the worker's own link decides
