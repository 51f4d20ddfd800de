"""Who asks the fork server (fork_server.py) for a program.

Each worker of Ray's runs this first: it imports little.
"""

import hashlib
import json
import os
import socket
import time
from typing import NamedTuple

ADDRESS = "FORK_SERVER"
"""The environment variable that names its socket."""
ROOT = os.path.abspath(f"{__file__}/../../..")
START_S = 60.0
"""For one to import Ray, on a machine that is busy."""
NETWORK = "FORK_NETWORK"
"""The environment variable that names the file of the network namespace where programs run."""
OF_ONE_TEST = "PYTEST_CURRENT_TEST"
"""The one variable that no program reads, and every test has another one. Ray reads that of the job
while it is imported: a worker of the next job would say that it is of this one and be sent away."""


class Order(NamedTuple):
    """A program, as JSON carries it."""

    arguments: list[str]
    """What the interpreter is given: ["-m", module, ...] or [script, ...]."""
    env: dict[str, str]
    folder: str
    group: int | None = None
    """The process group that it joins; None: it gets a session of its own."""
    serves: str = ""
    """No program: the address where it is a fork server that has imported Ray."""


def send(address: str, order: Order, files: tuple[int, int, int]) -> tuple[socket.socket, int]:
    """The connection, over which the exit status comes, and the new process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode()], files)
    return connection, int(connection.recv(64))


def send_to_ray(
    address: str, order: Order, files: tuple[int, int, int]
) -> tuple[socket.socket, int]:
    """As `send`, to the server that has imported Ray in this environment, started if need be."""
    about = sorted((k, v) for k, v in order.env.items() if k != OF_ONE_TEST)
    of_env = f"{address}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]}"
    deadline, is_asked = time.monotonic() + START_S, False
    while True:
        try:
            return send(of_env, order, files)
        except (OSError, ValueError):  # there is none yet, or it is just ending
            assert time.monotonic() < deadline, of_env
        if not is_asked:
            server = Order([], order.env, ROOT, serves=of_env)
            nothing = os.open(os.devnull, os.O_RDWR)
            send(address, server, (nothing,) * 3)[0].close()
            os.close(nothing)
            is_asked = True
        time.sleep(0.01)  # polling, bounded by the deadline
