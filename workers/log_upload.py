"""A worker's log on its way to a bucket, every few seconds, by a process of its own beside it.

That process outlives the worker for as long as it takes to bring what the worker has printed last;
of a machine that is lost, what was printed until some seconds before. It never imports torch.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from elastic.store.files import Folder, first_line, reach_folder
from elastic.store.journal import joined, segment_name, segments

EVERY_S = 5.0
SEGMENT_BYTES = 1 << 18
"""An upload writes the last segment anew, so that there are few of them."""
ENOUGH_S = 8.0
"""So long a worker waits for its log to be in the bucket, before its end. link.LAST_WORDS_S is
more, so that it can say that the log is not there."""
LAST_S = 4.0
"""So long the process may take once the worker is gone, also in a store that hangs."""
NICENESS = 10
DETACHED = """trap '' TERM; exec 3<&0; "$@" <&3 3<&- &"""
"""A shell that leaves a process which is nobody's child: Ray ends those of a worker that it kills.
A signal to the whole container or node is for the worker, whose last words are brought then."""
CODE = "import sys; sys.path += sys.argv[1:]; from workers.log_upload import main; main()"


class LogUpload:
    """One log: a local file that grows, and what the bucket has of it.

    The bucket's file goes on as the log of an earlier launch of the run does.
    """

    def __init__(self, path: Path, folder: Folder) -> None:
        """folder: `logs` of the run directory."""
        self._path, self._folder = path, folder
        self._earlier: bytes | None = None
        """What an earlier launch has left; None as long as the bucket was not asked."""
        self._start = self._end = 0
        """Of the last segment, and of what the bucket has, in bytes of the local file."""
        self._joined = 0
        """What is in one file there, in bytes of the local file."""

    @property
    def has_news(self) -> bool:
        return self._path.stat().st_size > self._end

    def bring(self) -> None:
        """What is new. OSError if the bucket does not take it."""
        if self._earlier is None:
            self._earlier = joined(self._folder, self._path.name)
            if segments(self._folder, self._path.name):
                self._publish(self._earlier)
        while self.has_news:
            with self._path.open("rb") as file:
                file.seek(self._start)
                content = file.read(SEGMENT_BYTES)
            at = len(self._earlier) + self._start
            name = segment_name(self._path.name, at) if at else self._path.name
            self._folder.write(name, content)
            self._end = self._start + len(content)
            if len(content) < SEGMENT_BYTES:
                break  # what has come meanwhile is the next call's
            self._start = self._end

    def join(self) -> None:
        """All of it, in one file."""
        self.bring()
        assert self._earlier is not None
        if self._joined == self._end:
            return
        if self._start or self._earlier:
            content = self._path.read_bytes()
            self._publish(self._earlier + content)
            self._start = self._end = len(content)
        self._joined = self._end

    def _publish(self, content: bytes) -> None:
        self._folder.write(self._path.name, content)
        for segment in segments(self._folder, self._path.name):
            self._folder.delete(segment)


class LogUploader:
    """The process, of one worker; it ends within LAST_S of it."""

    def __init__(self, path: Path, place: str) -> None:
        """place: the run directory, a URI, which may hold a secret and is in no command line.
        OSError if the process cannot be started."""
        # the user's modules come last: they may be named as those of the standard library
        paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", DETACHED, "sh", sys.executable, "-P", "-c", CODE, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            start_new_session=True,
        )
        self._process.wait()
        self._say({"path": str(path), "place": place, "worker": os.getpid()})

    def join(self) -> str:
        """All of the log is in the bucket; why it is not, if so."""
        try:
            self._say({})
            assert self._process.stdout is not None
            if not wait([self._process.stdout.fileno()], ENOUGH_S):  # select()'s are below 1,024
                return f"the bucket has not taken it within {ENOUGH_S:g} s"
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            return f"its uploader has ended: {first_line(error)}"

    def _say(self, words: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()


def ends_with(worker: int, orders: int) -> list[int]:
    """This process ends LAST_S after `worker`, a process id, or after the end of its `orders`, a
    pipe, whatever it is about. Gives what becomes readable with the worker's end: nothing where the
    kernel has no such thing, and the pipe must do. ProcessLookupError if the worker is gone."""
    poll, ends = select.poll(), list[int]()
    poll.register(orders, select.POLLHUP)
    try:
        ends.append(os.pidfd_open(worker))  # a child forked from the worker keeps the pipe open
        poll.register(ends[0], select.POLLIN)
    except ProcessLookupError:
        end_soon()
        raise
    except OSError as error:
        print(f"without pidfd_open: {error}", file=sys.stderr)

    def watch() -> None:
        poll.poll()
        end_soon()

    threading.Thread(target=watch, name="end", daemon=True).start()
    return ends


def end_soon() -> None:
    signal.setitimer(signal.ITIMER_REAL, LAST_S)  # by the kernel: Python may be stuck


def main() -> None:
    """The other end."""
    with suppress(OSError):
        os.nice(NICENESS)
    orders = open(0, "rb", buffering=0)  # noqa: SIM115
    told = json.loads(orders.readline())
    run: Folder | None = None
    path = Path(told["path"])
    upload: LogUpload | None = None

    def attempt(do: Callable[[LogUpload], None]) -> str:
        """Why it has failed. A run that came to nothing keeps no log."""
        nonlocal run, upload
        try:
            run = run or reach_folder(told["place"])
            upload = upload or LogUpload(path, run.at("logs"))
            if run.exists("config.json"):
                do(upload)
        except Exception as error:
            return first_line(error)
        return ""

    with suppress(ProcessLookupError):
        ends = ends_with(told["worker"], orders.fileno())
        while True:
            ready = select.select([orders, *ends], [], [], EVERY_S)[0]
            if not ready:
                if upload is None or upload.has_news:
                    attempt(LogUpload.bring)
            elif ready == [orders] and orders.readline():
                answer = json.dumps(attempt(LogUpload.join)) + "\n"
                with suppress(OSError):  # it may be gone by now
                    os.write(1, answer.encode())
            else:
                break
    attempt(LogUpload.join)
