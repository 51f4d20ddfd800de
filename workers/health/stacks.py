"""The Python stacks of every thread of a worker, taken from another process of its node.

The worker arms itself once; its pulse (pulse.py), which needs neither the worker's GIL nor its
main thread, collects. Standard library only. When to ask is the controller's decision.

A thread of the worker is asked first, which dumps the stacks while it holds the GIL. Only who does
not answer gets a signal: that dump is made whoever runs meanwhile, and a call that begins or ends
under it is now and then a segmentation fault (seen once in about a thousand dumps).
"""

import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ASK = signal.SIGRTMIN + 5
"""Nobody else's: Ray, torch and Python's own modules use none of the real-time signals."""
WITH_GIL_S = 0.15
"""So long the thread has for its answer, which needs the GIL: by default it comes by in 5 ms."""
LOOK_EVERY_S = 0.005
QUIET_S = 0.05
"""A dump that has not grown for so long, and ends as one does, is whole."""
ENDS = (" in <module>\n", " in _run_module_as_main\n", "  ...\n")
"""The first call of the main thread, whose stack is the last of a dump; or too many calls. A dump
that ends otherwise may be one of a process that just does not run, and has half of the time."""

FLAGS, PF_SIGNALED = 6, 0x400
"""Where proc(5) has a thread's flags, behind its name; and the one (linux/sched.h) that says that a
signal ends it."""


class Armed(NamedTuple):
    """File descriptors of an armed process, inherited by a child only where pass_fds names them."""

    dump: int
    """Where it writes its stacks."""
    bell: int
    """The end of a pipe: who writes to it has a thread write them."""


def arm() -> Armed:
    """From now on this process writes its stacks when it is asked to: by a thread, or else by ASK,
    at once, by C code that takes no lock, also while the GIL is held."""
    dump, (heard, bell) = os.memfd_create("stacks", 0), os.pipe()
    faulthandler.register(ASK, file=dump, all_threads=True, chain=False)
    threading.Thread(target=_answer, args=(heard, dump), name="stacks", daemon=True).start()
    return Armed(dump, bell)


def _answer(heard: int, dump: int) -> None:
    while os.read(heard, 4096):  # whoever has asked meanwhile gets the same dump
        faulthandler.dump_traceback(file=dump, all_threads=True)


def collect(pid: int, armed: Armed, timeout_s: float) -> str:
    """The stacks of process `pid`, which is armed, and of those forked from it (its loaders); what
    is known instead of those that are silent."""
    deadline = time.monotonic() + timeout_s
    text = collect_one(pid, armed.dump, timeout_s, armed.bell)
    for child in forks_of(pid):
        left_s = deadline - time.monotonic()
        if left_s > QUIET_S:
            text += f"\nprocess {child}, forked from it:\n{collect_one(child, armed.dump, left_s)}"
    return text


def forks_of(pid: int) -> list[int]:
    """Its children that run the same program, which are armed as it is: others would die of ASK."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children if Path(f"/proc/{c}/cmdline").read_bytes() == line]
    except OSError:
        return []


def collect_one(pid: int, dump: int, timeout_s: float, bell: int | None = None) -> str:
    """The stacks of one process; what is known instead if it is silent. bell: None: it was forked,
    and threads are not.

    A stopped process is woken for the moment it takes, and stopped again: it is about to be killed,
    and what it could say meanwhile is fenced like everything else.
    """
    before, deadline = os.fstat(dump).st_size, time.monotonic() + timeout_s
    is_stopped = False
    try:
        is_stopped = state_of(pid) == "T"
        if bell is not None:
            os.write(bell, b"?")
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        if bell is None or not has_begun(dump, before, min(WITH_GIL_S, timeout_s / 2)):
            os.kill(pid, ASK)
        text = read_when_whole(dump, before, deadline - time.monotonic())
    except (ProcessLookupError, FileNotFoundError):
        return f"process {pid} is gone\n"
    finally:
        if is_stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    if is_stopped:
        text = f"process {pid} was stopped by a signal (state T), here:\n{text}"
    return text or f"process {pid} did not answer in {timeout_s} s; {where_in_kernel(pid)}\n"


def has_begun(fd: int, before: int, timeout_s: float) -> bool:
    """Something comes after `before`."""
    deadline = time.monotonic() + timeout_s
    while os.fstat(fd).st_size == before and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return os.fstat(fd).st_size > before


def read_when_whole(fd: int, before: int, timeout_s: float) -> str:
    """What comes after `before`; empty if nothing does in time."""
    deadline = time.monotonic() + timeout_s
    size, grown_at, text = before, deadline, ""
    while (now := time.monotonic()) < deadline:
        if (found := os.fstat(fd).st_size) > size:
            size, grown_at = found, now
            text = os.pread(fd, size - before, before).decode(errors="replace")
        elif now - grown_at >= (QUIET_S if text.endswith(ENDS) else timeout_s / 2):
            break
        time.sleep(LOOK_EVERY_S)
    return text


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Fate:
    """Whether a signal has ended a process: it runs no more, though it is there until its memory is
    freed, and its connections with it. Made to be asked often."""

    def __init__(self, pid: int) -> None:
        """FileNotFoundError if there is no such process."""
        self._main_thread = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def is_killed(self) -> bool:
        """ProcessLookupError once it is gone."""
        fields = os.pread(self._main_thread, 1024, 0).rpartition(b")")[2].split(maxsplit=FLAGS + 1)
        return bool(int(fields[FLAGS]) & PF_SIGNALED)


def where_in_kernel(pid: int) -> str:
    """State and kernel function of every thread, for a process that cannot run any code."""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
        places = [f"{task.name} in {(task / 'wchan').read_text() or '?'}" for task in tasks]
        return f"state {state_of(pid)}, threads: {', '.join(places)}"
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        return f"its threads cannot be looked at: {error}"
