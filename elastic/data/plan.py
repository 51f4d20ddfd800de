"""`Plan`: the units of a Parquet data set and the order in which each epoch uses them.

A function of the files' footers, the source's settings and the seed: no world size, no history.
Reading footers is footers.py's, rows are reading.py's, positions in the stream are stream.py's.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

from elastic.data.permutation import permutation
from elastic.data.source import ParquetSource

LAYOUT, DOTTED_LAYOUT = 2, 3
"""Grows when the same files and settings make other windows than before. The second where a name
in `columns=[...]` has a dot: such columns had no size before."""
MAX_TOLD = 5
"""Differences that are named in an error; of the others it says how many."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file as its footer describes it."""

    path: str
    """For people and for the record: a URI without credentials and parameters, or a local path;
    a relative one where its root is."""
    inside: str
    """In the filesystem of its root; relative as `path` is."""
    root: int
    """Which of the source's paths it was found in."""
    size_bytes: int
    row_groups: tuple[tuple[int, int], ...]
    """(rows, uncompressed bytes of the chosen columns) of each."""
    problem: str = ""
    """Why it is left out, where the source says so; it has no row groups then."""

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.row_groups)


@dataclass(frozen=True, slots=True)
class Unit:
    """One row group: what is read as a whole."""

    index: int
    file: PlannedFile
    row_group: int
    first_row: int
    """Its first row's number in the data set, files in the order of their paths."""
    num_rows: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.file.path}, row group {self.row_group}"


@dataclass(frozen=True)
class Plan:
    """What is read, and in which order. Equal plans give equal streams."""

    source: ParquetSource
    seed: int
    files: tuple[PlannedFile, ...]
    schema: str
    """Names and types of the chosen columns."""
    columns: tuple[str, ...] = ()
    """Their order in every unit: that of `columns=[...]`, else of the first file with rows."""

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All that hold rows, in the order of the files."""
        found: list[Unit] = []
        first_row = 0
        for file in self.files:
            for row_group, (rows, size_bytes) in enumerate(file.row_groups):
                if rows:
                    found.append(Unit(len(found), file, row_group, first_row, rows, size_bytes))
                    first_row += rows
        return tuple(found)

    @property
    def num_rows(self) -> int:
        """Rows in the files; an epoch's, before transforms."""
        return sum(file.num_rows for file in self.files)

    def windows(self, epoch: int) -> tuple[tuple[Unit, ...], ...]:
        """The epoch's windows in order: consecutive units that are read and shuffled together."""
        return _windows(self, epoch)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that the stream depends on, but for the transform's code."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.hash)

    def to_json(self) -> dict[str, Any]:
        """For the run directory: later starts compare with it."""
        source = self.source
        return {
            "layout": DOTTED_LAYOUT if "." in "".join(source.columns or ()) else LAYOUT,
            "seed": self.seed,
            "shuffle": source.shuffle,
            "window_bytes": source.window_bytes,
            "keeps_rows": source.keeps_rows,
            "num_transforms": len(source.transforms),
            "packing": None if source.packing is None else source.packing.to_json(),
            "schema": self.schema,
            "files": {
                f.path: [f.size_bytes, [rows for rows, _ in f.row_groups]] for f in self.files
            },
        }


@lru_cache(maxsize=8)
def _windows(plan: Plan, epoch: int) -> tuple[tuple[Unit, ...], ...]:
    units, limit = plan.units, plan.source.window_bytes
    if plan.source.shuffle:
        order = permutation(len(units), "units", plan.seed, epoch).tolist()
    else:
        order = list(range(len(units)))
    windows: list[tuple[Unit, ...]] = []
    window: list[Unit] = []
    size_bytes = 0
    for index in order:
        unit = units[index]
        if window and size_bytes + unit.size_bytes > limit:
            windows.append(tuple(window))
            window, size_bytes = [], 0
        window.append(unit)
        size_bytes += unit.size_bytes
    if window:
        windows.append(tuple(window))
    return tuple(windows)


def differences(past: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two plans (`Plan.to_json`), a few in words; empty if nothing did."""
    found = [
        f"{name} was {past.get(name)!r} and now is {now[name]!r}"
        for name in sorted(now.keys() - {"files"})
        if past.get(name) != now[name]
    ]
    before = cast("dict[str, Any]", past["files"])
    after = cast("dict[str, Any]", now["files"])
    found += [f"{path} is missing" for path in sorted(before.keys() - after.keys())]
    found += [f"{path} is new" for path in sorted(after.keys() - before.keys())]
    for path in sorted(before.keys() & after.keys()):
        if list(before[path]) != list(after[path]):
            found.append(f"{path} changed: {_file_change(before[path], after[path])}")
    return found


def _file_change(before: Sequence[Any], after: Sequence[Any]) -> str:
    if before[0] != after[0]:
        return f"{before[0]} bytes before, {after[0]} now"
    return f"row groups of {before[1]} rows before, {after[1]} now"


def told(found: Sequence[str]) -> str:
    """A list of differences as one line."""
    rest = f"; and {len(found) - MAX_TOLD} more" if len(found) > MAX_TOLD else ""
    return "; ".join(found[:MAX_TOLD]) + rest
