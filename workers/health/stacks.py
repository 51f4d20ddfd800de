"""The Python stacks of every thread of a worker, taken from another process of its node.

The worker arms itself once; its pulse (pulse.py), which needs neither the worker's GIL nor its
main thread, collects. Standard library only. When to ask is the controller's decision.
"""

import faulthandler
import os
import signal
import time
from pathlib import Path

ASK = signal.SIGRTMIN + 5
"""Nobody else's: Ray, torch and Python's own modules use none of the real-time signals."""
LOOK_EVERY_S = 0.005
QUIET_S = 0.05
"""A dump that has not grown for so long, and ends as one does, is whole."""
ENDS = (" in <module>\n", " in _run_module_as_main\n", "  ...\n")
"""The first call of the main thread, whose stack is the last of a dump; or too many calls. A dump
that ends otherwise may be one of a process that just does not run, and has half of the time."""


def arm() -> int:
    """From now on ASK makes this process write its stacks to the returned file, at once, by C code
    that takes no lock: also while the GIL is held or the main thread is stuck."""
    fd = os.memfd_create("stacks", 0)  # inherited by a child only where pass_fds names it
    faulthandler.register(ASK, file=fd, all_threads=True, chain=False)
    return fd


def collect(pid: int, fd: int, timeout_s: float) -> str:
    """The stacks of process `pid`, which has armed `fd`, and of those forked from it (its loaders);
    what is known instead of those that are silent."""
    deadline = time.monotonic() + timeout_s
    text = collect_one(pid, fd, timeout_s)
    for child in forks_of(pid):
        left_s = deadline - time.monotonic()
        if left_s > QUIET_S:
            text += f"\nprocess {child}, forked from it:\n{collect_one(child, fd, left_s)}"
    return text


def forks_of(pid: int) -> list[int]:
    """Its children that run the same program, which are armed as it is: others would die of ASK."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children if Path(f"/proc/{c}/cmdline").read_bytes() == line]
    except OSError:
        return []


def collect_one(pid: int, fd: int, timeout_s: float) -> str:
    """The stacks of one process; what is known instead if it is silent.

    A stopped process is woken for the moment it takes, and stopped again: it is about to be killed,
    and what it could say meanwhile is fenced like everything else.
    """
    before = os.fstat(fd).st_size
    try:
        is_stopped = state_of(pid) == "T"
        os.kill(pid, ASK)
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        text = read_when_whole(fd, before, timeout_s)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    except (ProcessLookupError, FileNotFoundError):
        return f"process {pid} is gone\n"
    if is_stopped:
        text = f"process {pid} was stopped by a signal (state T), here:\n{text}"
    return text or f"process {pid} did not answer in {timeout_s} s; {where_in_kernel(pid)}\n"


def read_when_whole(fd: int, before: int, timeout_s: float) -> str:
    """What comes after `before`; empty if nothing does."""
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


def where_in_kernel(pid: int) -> str:
    """State and kernel function of every thread, for a process that cannot run any code."""
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
        places = [f"{task.name} in {(task / 'wchan').read_text() or '?'}" for task in tasks]
        return f"state {state_of(pid)}, threads: {', '.join(places)}"
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        return f"its threads cannot be looked at: {error}"
