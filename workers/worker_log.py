"""What a worker's process prints, in the run directory's `logs/<worker>.log`.

Until the run directory exists it goes to an unnamed file, whose content moves along. A loader
process, forked early, keeps printing there; `collect` brings that over.
"""

import io
import os
import sys
import tempfile
from pathlib import Path

from elastic.store.files import open_own


class WorkerLog:
    """Owns this process's stdout and stderr."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._early = tempfile.TemporaryFile(prefix=f"elastic-{name}-")  # noqa: SIM115
        self._moved = 0
        self.path: Path | None = None
        self._direct(self._early.fileno())

    def _direct(self, fd: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)

    def move_to(self, folder: Path) -> None:
        """From now on print to `folder`/<worker>.log."""
        if self.path is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{self._name}.log"
        with open_own(self.path, "ab") as file:
            self._direct(file.fileno())
        self.collect()

    def collect(self) -> None:
        """Append what was printed to the early file since the last time."""
        if self.path is None:
            return
        new = os.pread(self._early.fileno(), 2**24, self._moved)
        self._moved += len(new)
        with open_own(self.path, "ab") as file:
            file.write(new)
