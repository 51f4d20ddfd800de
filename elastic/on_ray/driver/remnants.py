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
"""For Ray to end its processes by itself."""


class Remnants:
    """Watches this process, until it has shut its Ray down."""

    def __init__(self, session: str, ray: str) -> None:
        """session: the folder of the Ray that this process has started; no other Ray has its name.
        ray: the folder of the installed package."""
        command = [sys.executable, "-I", "-S", __file__, session, ray, str(os.getpid())]
        self._process = subprocess.Popen(command, start_new_session=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def end_after(driver: int, session: str, ray: str) -> None:
    """driver: this process's parent."""
    while os.getppid() == driver:
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of(session, ray)) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(session: str, ray: str) -> list[int]:
    """Programs of Ray with the session's folder, or what lies in it, in their command lines."""
    name, program, found = os.path.basename(session), f"{ray}/", list[int]()
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it has just ended
            if entry.isdigit() and int(entry) != os.getpid():
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().decode(errors="replace").split("\0")
                is_of_ray = any(word.startswith(program) for word in words[:4])
                if is_of_ray and any(name in word.split("/") for word in words):
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    end_after(int(sys.argv[3]), sys.argv[1], sys.argv[2])
