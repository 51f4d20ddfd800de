"""Starts Python programs by forking a process that has imported what they will: torch takes 2.4 s.

Ray reads a process's environment while it is imported: for each environment in which programs of
Ray's run there is another such process, forked from the first, that has imported Ray as well. What
a program does is none of its parent's: it has arguments, environment, folder, files and a session
of its own.
"""

import contextlib
import ctypes
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
import time
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.fork_client import NETWORK, Order, send, send_to_ray

ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("torch", "torch._dynamo", "numpy", "pyarrow.fs", "pyarrow.dataset", "pyarrow.parquet"),
    *("cloudpickle", "google.protobuf.json_format", "jsonschema", "msgpack"),
    *("requests", "tensorboardX", "typer", "yaml", "rich.live", "aiohttp.web", "optparse"),
    *("pyarrow.json", "pydantic.errors", "pydantic.v1"),
    *("elastic.cli.app", "elastic.cli.progress", "elastic.cli.run_options", "elastic.cli.screen"),
    *("elastic.controller.recorder", "elastic.driver.display", "elastic.driver.launch"),
    *("workers.worker", "workers.backup.server", "workers.distributed.rendezvous"),
)
OF_RAY = (
    *("ray", "ray._private.async_compat", "ray._private.runtime_env.setup_hook"),
    *("ray._common.pydantic_compat", "ray._common.usage.usage_lib"),
    *("ray._private.arrow_serialization", "ray._private.process_watcher"),
    "ray._private.runtime_env.uv_runtime_env_hook",
    *("elastic.on_ray.driver.submission", "elastic.controller.supervisor"),
    *("elastic.on_ray.feed.client", "elastic.on_ray.feed.actor", "elastic.on_ray.backup.servers"),
)
"""None of these draws at random while it is imported, as ray.dag does: all children would draw the
same then."""
MAX_ORDER_BYTES = 1 << 20
IDLE_S = 30.0
"""A server with Ray ends after so long without a child."""
LOOK_S = 2.0
CLONE_NEWNET = 0x40000000


# --- the server -----------------------------------------------------------------
def serve(listener: socket.socket, parent: int | None = None) -> Order:
    """Fork a child per order, and tell who asked its pid and then its exit status.

    It returns in each of the children, which become the program. The server ends with its parent:
    the one that has its standard input, or `parent`; then also when it has had no child for long.
    """
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own
    asked: dict[int, socket.socket] = {}
    last_used = time.monotonic()
    heard = [listener, wake] if parent else [listener, wake, sys.stdin]
    while True:
        ready, _, _ = select.select(heard, [], [], LOOK_S if parent else None)
        last_used = time.monotonic() if asked or ready else last_used
        if sys.stdin in ready or (parent and is_over(parent, last_used)):
            leave(listener)
        if wake in ready:
            wake.recv(4096)
            tell_ended(asked)
        if listener in ready:
            connection = listener.accept()[0]
            content, files, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 3)
            if not content:  # who was to ask has been killed before
                connection.close()
                continue
            order = Order(*json.loads(content))
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, on_interrupt)  # ignored in a shell's background
                leave_server(files, (listener, wake, waker, connection, *asked.values()))
                return order
            for file in files:
                os.close(file)
            asked[pid] = connection
            if order.group is not None:  # of who asked, which must not end before the child is in
                with contextlib.suppress(OSError):  # who asked has been killed, or the child
                    os.setpgid(pid, order.group)
            with contextlib.suppress(OSError):  # who asked has been killed
                connection.sendall(b"%d" % pid)


def is_over(parent: int, last_used: float) -> bool:
    return os.getppid() != parent or time.monotonic() - last_used > IDLE_S


def leave(listener: socket.socket) -> None:
    Path(listener.getsockname()).unlink(missing_ok=True)
    os._exit(0)


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


def take_over(order: Order, left: dict[str, str]) -> None:
    """left: what Ray's import leaves in the environment."""
    if order.serves:
        os.setpgid(0, 0)  # in the session of the groups that its children join
    elif order.group is None:
        os.setsid()
    if NETWORK in order.env and not order.serves:
        enter_network(order.env[NETWORK])
    os.environ.clear()
    os.environ.update(order.env | left)
    os.chdir(order.folder)


def enter_network(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{path} cannot be entered")


def import_ray(order: Order) -> dict[str, str]:
    """What that leaves in the environment."""
    before, threads = dict(os.environ), os.listdir("/proc/self/task")
    for name in OF_RAY:
        importlib.import_module(name)
    assert os.listdir("/proc/self/task") == threads, "a child would not have Ray's"
    return {k: v for k, v in os.environ.items() if before.get(k) != v}


def become(order: Order, standard: list[str]) -> None:
    """What the interpreter does when it is started so. standard: what every program's path has."""
    gc.enable()
    is_module = order.arguments[0] == "-m"
    program, *rest = order.arguments[is_module:]
    sys.argv = [program, *rest]
    path = [entry for entry in order.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = order.folder if is_module else str(Path(program).parent)
    sys.path[:] = [first, *path, *(p for p in standard if p not in path)]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def main(address: str) -> None:
    gc.disable()  # what is imported is no garbage, and to look for some takes half as long again
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    standard, left = sys.path[1:], dict[str, str]()
    order = listen(address)
    while order.serves:
        parent = os.getppid()
        take_over(order, left)
        left = import_ray(order)
        standard = [p for p in sys.path if p not in (str(ROOT), *standard)] + standard
        order = listen(order.serves, parent)
    take_over(order, left)
    become(order, standard)


def listen(address: str, parent: int | None = None) -> Order:
    """As `serve`, at the address. A server that finds another one there ends."""
    gc.collect()
    gc.freeze()  # else each child's first collection would copy the pages of all that it has
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            os._exit(0)
        listener.listen(64)
        print("ready", flush=True)
        return serve(listener, parent)


# --- who asks it ----------------------------------------------------------------
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

    def __init__(self, address: str, order: Order, *, with_ray: bool = False) -> None:
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), self._out.fileno(), self._err.fileno())
            ask = send_to_ray if with_ray else send
            self._connection, self.pid = ask(address, order, files)
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

    def errors_so_far(self) -> str:
        """It may still write."""
        return os.pread(self._err.fileno(), 1 << 20, 0).decode()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return tuple(file.read() for file in (self._out, self._err) if not file.seek(0))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
