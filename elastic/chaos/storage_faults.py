"""Faults of a run's storage: bits of a checkpoint flip, and the disk fills up for a while.

When that happens is plan.py's, what the run makes of it elastic/store's.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path

from elastic.protocol.errors import WrongInput
from elastic.protocol.manifest import MANIFEST
from elastic.store.catalogue import Catalogue, folder_name
from elastic.store.files import Folder

FLIPPED_BITS = 4
BALLAST = ".chaos-ballast"
"""In the run directory, while its disk is full."""
GROW_EVERY_S = 0.1
BLOCKS = (1 << 20, 1 << 12)
"""Bytes that are written at once, and once no more of the first fit."""


# --- bits --------------------------------------------------------------------------
def choose_part(run: Folder, dice: random.Random) -> str | None:
    """`step-00000100/FILE` of the run's newest checkpoint; None while it has none."""
    catalogue = Catalogue(run.at("checkpoints"))
    steps = catalogue.steps()
    if not steps:
        return None
    sizes = catalogue.of_step(steps[-1]).sizes()
    names = sorted(name for name, size in sizes.items() if size and name != MANIFEST)
    return f"{folder_name(steps[-1])}/{dice.choice(names)}" if names else None


def flip_bits(run: Folder, part: str, dice: random.Random) -> None:
    """In a file of a checkpoint, whose size stays. OSError if it is gone."""
    step, _, name = part.partition("/")
    folder = run.at("checkpoints").at(step)
    size_bytes = folder.size(name) or 0
    flips = {
        at: 1 << dice.randrange(8)
        for at in dice.sample(range(size_bytes), min(FLIPPED_BITS, size_bytes))
    }
    if folder.local is None:
        content = bytearray(folder.read(name))
        for at, bit in flips.items():
            content[at] ^= bit
        folder.write(name, bytes(content))
        return
    with (folder.local / name).open("r+b", buffering=0) as file:
        for at, bit in flips.items():
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ bit]), at)


# --- room ----------------------------------------------------------------------------
def refuse_large_disk(run: Folder, at_most_gb: float) -> None:
    """WrongInput unless the run is in a local folder whose disk has no more room than that."""
    if run.local is None:
        raise WrongInput(f"fill needs a run in a local folder: {run} is in an object store")
    free_gb = shutil.disk_usage(run.local).free / 1e9
    if free_gb > at_most_gb:
        raise WrongInput(
            f"fill is for a small disk: {free_gb:.1f} GB are free at {run}, more than at_most_gb: "
            f"{at_most_gb:g}; put the run on a small file system (mount -t tmpfs -o size=64m)"
        )


class Ballast:
    """A file that takes the room that is left on a run's disk, and what becomes free meanwhile.
    Whoever fills and whoever looks may be different threads."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._path: Path | None = None
        self._limit_bytes = 0
        self._until = self._next_at = inf
        self._lock = threading.Lock()
        self.gone_at = -inf
        """Monotonic seconds, when there was room again."""

    @property
    def is_there(self) -> bool:
        return self._path is not None

    def fill(self, run: Folder, at_most_gb: float, now: float, until: float) -> None:
        """until: monotonic seconds, as now. WrongInput if the disk is none to be filled."""
        with self._lock:
            if self._path is None:
                refuse_large_disk(run, at_most_gb)
            assert run.local is not None
            self._path, self._limit_bytes = run.local / BALLAST, int(at_most_gb * 1e9)
            self._until, self._next_at = until, now + GROW_EVERY_S
            self._grow(self._path)

    def look(self, now: float) -> None:
        """Often. now: infinite at the end of all."""
        with self._lock:
            if self._path is None:
                return
            if now >= self._until or now == inf:
                self._path.unlink(missing_ok=True)
                self._tell(f"the ballast is gone: {self._path}")
                self.gone_at = time.monotonic()  # first: a run is not over in between
                self._path = None
            elif now >= self._next_at:
                self._next_at = now + GROW_EVERY_S
                self._grow(self._path)

    def _grow(self, path: Path) -> None:
        with path.open("ab", buffering=0) as file:
            for size_bytes in BLOCKS:
                block = bytes(size_bytes)
                with suppress(OSError):  # it is full
                    while file.tell() < self._limit_bytes and file.write(block) == size_bytes:
                        pass
