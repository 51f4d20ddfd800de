"""A command in a terminal of its own, and what appears there, line by line with its time."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence

ROWS, COLUMNS = 60, 2000
"""So wide that no line is folded."""
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-KST]")
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
READ_BYTES = 1 << 16
END_S = 10.0


class Terminal:
    """Its process has the terminal for its input, output and errors. Use as a context manager."""

    def __init__(self, command: Sequence[str], env: dict[str, str], folder: str = ".") -> None:
        self.begun_at = time.monotonic()
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env | {"TERM": "xterm-256color"},
            cwd=folder,
            start_new_session=True,
        )
        os.close(theirs)
        self._ours, self._text = ours, b""
        self.first_s: float | None = None
        """Until something could be read there."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2 * END_S)
            self.process.kill()
            self.process.wait(END_S)
        self._reader.join(END_S)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while said := os.read(self._ours, READ_BYTES):
                self._text += said
                if self.first_s is None and self.lines():
                    self.first_s = time.monotonic() - self.begun_at
        os.close(self._ours)

    def lines(self) -> list[str]:
        """All that has appeared, in its order, without what moves the cursor or colours."""
        return lines_of(self._text.decode(errors="replace"))


def lines_of(text: str) -> list[str]:
    """Those that say something."""
    plain = COLOUR.sub("", CURSOR.sub("\n", text))
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
