"""Starts Python programs by forking a process that has imported what they will: torch takes 2.4 s.

Nothing of Ray is imported, which reads a process's environment while it is. What a program does is
none of its parent's: it has arguments, environment, folder, files and a session of its own.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ADDRESS = "FORK_SERVER"
"""The environment variable that names its socket."""
ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("torch", "torch._dynamo", "numpy", "pyarrow.fs", "pyarrow.dataset", "pyarrow.parquet"),
    *("cloudpickle", "google.protobuf.json_format", "jsonschema", "msgpack"),
    *("requests", "tensorboardX", "typer", "yaml", "rich.live"),
    *("elastic.cli.app", "elastic.controller.recorder", "workers.worker", "workers.backup.server"),
)
MAX_ORDER_BYTES = 1 << 20


class Order(NamedTuple):
    """A program, as JSON carries it."""

    arguments: list[str]
    """What the interpreter is given: ["-m", module, ...] or [script, ...]."""
    env: dict[str, str]
    folder: str
    group: int | None = None
    """The process group that it joins; None: it gets a session of its own."""


# --- the server -----------------------------------------------------------------
def serve(listener: socket.socket) -> Order:
    """Fork a child per order, and tell who asked its pid and then its exit status.

    It returns in each of the children, which become the program. The server ends with its parent.
    """
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own
    asked: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, wake, sys.stdin], [], [])
        if sys.stdin in ready:  # its parent has ended
            os._exit(0)
        if wake in ready:
            wake.recv(4096)
            tell_ended(asked)
        if listener in ready:
            connection = listener.accept()[0]
            content, files, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 3)
            order = Order(*json.loads(content))
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, on_interrupt)  # ignored in a shell's background
                leave_server(files, (listener, wake, waker, connection, *asked.values()))
                return order
            for file in files:
                os.close(file)
            asked[pid] = connection
            with contextlib.suppress(OSError):  # who asked has been killed
                if order.group is not None:  # its own, which must not end before the child is in
                    os.setpgid(pid, order.group)
                connection.sendall(b"%d" % pid)


def leave_server(files: list[int], sockets: Iterable[socket.socket]) -> None:
    """In a child: nothing of the server's is open any more, and the end of a child is no news."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for i, file in enumerate(files):
        os.dup2(file, i)
        os.close(file)
    for one in sockets:
        one.close()


def tell_ended(asked: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with asked.pop(ended[0]) as connection, contextlib.suppress(OSError):
                connection.sendall(b"%d" % os.waitstatus_to_exitcode(ended[1]))


def become(order: Order) -> None:
    """What the interpreter does when it is started so."""
    if order.group is None:
        os.setsid()
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.folder)
    is_module = order.arguments[0] == "-m"
    program, *rest = order.arguments[is_module:]
    sys.argv = [program, *rest]
    path = [entry for entry in order.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = order.folder if is_module else str(Path(program).parent)
    sys.path[:] = [first, *path, *(p for p in sys.path[1:] if p not in path)]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def main(address: str) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.collect()
    gc.freeze()  # else each child's first collection would copy the pages of all that it has
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        order = serve(listener)
    become(order)


# --- who asks it ----------------------------------------------------------------
def send(address: str, order: Order, files: tuple[int, int, int]) -> tuple[socket.socket, int]:
    """The connection, over which the exit status comes, and the new process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(order).encode()], files)
    return connection, int(connection.recv(64))


class ForkServer:
    """The process, of which each test process has one; `close` ends it, and nothing it started."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ef-", dir="/tmp")
        self.address = f"{self._folder.name}/socket"
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        # what torch and numpy read while they load, as Ray's workers and ours have it
        env |= {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.fork_server", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd=ROOT,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._process.communicate("")
        self._folder.cleanup()


class Forked:
    """A program started by a fork server, with the face of a subprocess.Popen."""

    def __init__(self, address: str, order: Order) -> None:
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), self._out.fileno(), self._err.fileno())
            self._connection, self.pid = send(address, order, files)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._connection.recv(64))
            self._connection.close()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        self.wait()
        return tuple(file.read() for file in (self._out, self._err) if not file.seek(0))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
