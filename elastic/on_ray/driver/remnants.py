"""What is left of a Ray whose driver was killed: a small process of its own, this file, ends it.

Raylet, head and workers end by themselves. Ray's agents live on for as long as they try to tell
the head, which is gone, of the raylet's death. Runs without Ray and without our other modules.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

LOOK_EVERY_S = 0.25
GRACE_S = 3.0
"""For them to end by themselves."""


class Remnants:
    """Watches this process, until it has shut its Ray down."""

    def __init__(self) -> None:
        """Once this process has started a Ray."""
        known = [f"{pid}:{started}" for pid, started in agents_of(os.getpid()).items()]
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *known]
        self._process = subprocess.Popen(command, start_new_session=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def agents_of(driver: int) -> dict[int, int]:
    """Those that the raylet has started which the driver has started, and when."""
    parents = {pid: int(fields[1]) for pid in running() if (fields := stat_of(pid))}
    raylets = [p for p, parent in parents.items() if parent == driver and "raylet" in command_of(p)]
    return {
        pid: int(fields[19])
        for pid, parent in parents.items()
        if parent in raylets and "agent" in command_of(pid).lower() and (fields := stat_of(pid))
    }


def end_after(driver: int, known: dict[int, int]) -> None:
    """driver: this process's parent. known: when each process was started, as no other of its
    number was."""
    while os.getppid() == driver:
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + GRACE_S
    while (left := [p for p in known if lives(p, known[p])]) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int, started: int) -> bool:
    fields = stat_of(pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == started


def running() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat (proc(5)) from the third, the state, on; None if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()
    return None


def command_of(pid: int) -> str:
    """Empty if it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return command.read().decode(errors="replace")
    return ""


if __name__ == "__main__":
    pairs = (word.partition(":") for word in sys.argv[2:])
    end_after(int(sys.argv[1]), {int(pid): int(started) for pid, _, started in pairs})
