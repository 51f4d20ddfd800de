# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`Package`: what of TARGET's folder Ray ships to every node, and what stays.

Run directories stay: they grow, and the job that wrote them is beside them. Shipping is Ray's.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUN_MARKS = frozenset(("config.json", "journal.jsonl"))
"""A folder that has both is a run directory."""
CHECKPOINTS = "checkpoints/step-*/manifest.json"
"""A folder that has one is a run directory, too: `elastic checkpoint import` begins it so."""
MAX_BYTES = 100 * 2**20
MAX_COUNTED = 20_000
"""Files that are counted where there is too much anyway."""
NAMED = 3
"""The largest that are named of what is too much."""


@dataclass(frozen=True, slots=True)
class Package:
    """What would be shipped of a folder."""

    folder: Path
    excludes: tuple[str, ...]
    """Ray's `excludes`, patterns as in .gitignore."""
    sizes: Counter[str]
    """Bytes, not compressed, by what lies directly in the folder."""
    is_whole: bool
    """False: there is more, which was not counted."""

    @property
    def size_bytes(self) -> int:
        return self.sizes.total()

    @property
    def is_too_large(self) -> bool:
        return self.size_bytes > MAX_BYTES

    def __str__(self) -> str:
        """Why it is too large."""
        largest = ", ".join(f"{n} {megabytes(s)}" for n, s in self.sizes.most_common(NAMED))
        more = "" if self.is_whole else "more than "
        return (
            f"it holds {more}{megabytes(self.size_bytes)} without its runs (the largest: "
            f"{largest}), and at most {megabytes(MAX_BYTES)} go to the nodes"
        )


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MB"


class _Walk:
    """Through the files that Ray would ship: it follows links and obeys ignore files."""

    def __init__(self, folder: Path, run_directory: Path, max_counted: int) -> None:
        self.folder, self._max_counted = folder, max_counted
        self.excludes: list[str] = []
        self.sizes: Counter[str] = Counter()
        self.num_files = 0
        self._own = identity(run_directory)
        self._storage = identity(run_directory.parent)

    @property
    def is_over(self) -> bool:
        return self.num_files > self._max_counted and self.sizes.total() > MAX_BYTES

    def enter(self, folder: Path, ignoring: tuple[Callable[[Path], bool], ...]) -> None:
        ignoring += ignored_in(folder)
        if any(is_ignored(folder) for is_ignored in ignoring):
            return
        for path in entries(folder):
            if self.is_over:
                return
            if any(is_ignored(path) for is_ignored in ignoring):
                continue
            if not path.is_dir():
                self._count(path)
            elif self._stays(path):
                self.excludes.append(pattern_of(path.relative_to(self.folder)))
            else:
                self.enter(path, ignoring)

    def _count(self, path: Path) -> None:
        self.num_files += 1
        with suppress(OSError):  # a link to nothing, or it has just gone
            self.sizes[path.relative_to(self.folder).parts[0]] += path.stat().st_size

    def _stays(self, folder: Path) -> bool:
        """Run directories, storage that holds nothing else, and links to where they lie."""
        here = identity(folder)
        if here is not None and here == self._storage:
            return all(self._is_run(p) or p.name.startswith(".") for p in entries(folder))
        is_loop = here in map(identity, folder.parents)
        return is_loop or self._is_run(folder)

    def _is_run(self, path: Path) -> bool:
        here = identity(path)
        return (here is not None and here == self._own) or is_run_directory(path)


def package_of(folder: Path, run_directory: str, *, max_counted: int = MAX_COUNTED) -> Package:
    """run_directory: a path or URI; it need not exist yet. max_counted: files that are counted at
    least."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import (
        _get_excludes,  # pyright: ignore[reportPrivateUsage]
    )

    walk = _Walk(folder, Path(run_directory), max_counted)
    walk.enter(folder, (_get_excludes(folder, get_runtime_env_default_excludes()),))
    return Package(folder, tuple(walk.excludes), walk.sizes, not walk.is_over)


def ignored_in(folder: Path) -> tuple[Callable[[Path], bool], ...]:
    """What the folder's .gitignore and .rayignore say.

    Private API of Ray, this place and `package_of` only: what it ships cannot be asked otherwise.
    """
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    has_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    return tuple(get_excludes_from_ignore_files(folder, include_gitignore=has_gitignore))


def is_run_directory(folder: Path) -> bool:
    names = {path.name for path in entries(folder)}
    return names >= RUN_MARKS or ("checkpoints" in names and any(folder.glob(CHECKPOINTS)))


def entries(folder: Path) -> list[Path]:
    """In the order of their names; empty if it is no folder, or may not be read."""
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def identity(path: Path) -> tuple[int, int] | None:
    """The same for all names of a file or folder; None if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def pattern_of(path: Path) -> str:
    """What matches this path alone."""
    text = re.sub(r"([\\*?\[\]])", r"\\\1", path.as_posix())
    return "/" + (f"{text[:-1]}\\ " if text.endswith(" ") else text)
