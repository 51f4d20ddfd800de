"""`anatomy.jsonl` as its readers take it: rows, and what share of a step's time each part has.

Who measures is workers/health/anatomy.py; what the fields mean is in docs/running.md.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, Kinds, check_kinds
from elastic.store.journal import LineTail

NAME = "anatomy.jsonl"
PARTS = ("data", "compute", "gather", "reduce", "wait", "vote", "apply")
KINDS: Kinds = {
    "step": int,
    "steps": int,
    "generation": int,
    "rank": int,
    "world_size": int,
    "worker": str,
    "time": float,
    "step_s": float,
    **{f"{part}_s": float for part in PARTS},
    "memory_bytes": int,
    "gpu_memory_bytes": int | None,
    "spans": list,
}
LAST_BYTES = 1 << 18
"""Of the file's end: enough for the newest row of each of many ranks."""

Row: TypeAlias = dict[str, Any]


def newest(folder: Folder) -> list[Row]:
    """The newest row of each rank of the newest generation, by rank. Reads the file's end only."""
    lines = LineTail(folder, NAME, last_bytes=LAST_BYTES).poll()
    rows = [line for line in lines if is_row(line)]
    generation = max((row["generation"] for row in rows), default=0)
    found = {row["rank"]: row for row in rows if row["generation"] == generation}
    return [found[rank] for rank in sorted(found)]


def is_row(line: Row) -> bool:
    """Others may have put something there; measurements that are none are passed over."""
    try:
        check_kinds(line, KINDS, NAME)
    except WrongInput:
        return False
    seconds = (line["step_s"], line["time"], *(line[f"{part}_s"] for part in PARTS))
    return all(math.isfinite(s) and s >= 0 for s in seconds)


def shares(rows: Iterable[Row]) -> dict[str, float]:
    """Of all their time, by part; they add up to 1. Nothing for no time at all."""
    sums = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        for part in PARTS:
            sums[part] += row[f"{part}_s"]
    total_s = sum(sums.values())
    return {part: s / total_s for part, s in sums.items()} if total_s > 0 else {}


def peaks_of(rows: Iterable[Row]) -> dict[str, int]:
    """The highest of all ranks, in bytes; without `gpu` where there is none."""
    fields = {"process": "memory_bytes", "gpu": "gpu_memory_bytes"}
    found = {word: [r[f] for r in rows if r[f] is not None] for word, f in fields.items()}
    return {word: max(sizes) for word, sizes in found.items() if sizes}


@dataclass(frozen=True)
class Shares:
    """Of the time of all ranks."""

    step: int
    """The last of the steps."""
    time: float
    """Unix seconds."""
    shares: dict[str, float]
    peaks_bytes: dict[str, int]
    """Memory of the rank that had most of it: `process`, and `gpu` where there is one."""


class SharesByStep:
    """Rows as ranks send them, each some at a time, of steps that are whole once all have."""

    MOST_STEPS = 64
    """Ranks are never so far apart: an older step is one of which a row was lost."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, Row]] = {}
        """By step, by rank."""
        self._told = self._generation = 0

    def hear(self, rows: Iterable[Row]) -> list[Shares]:
        """What is whole by now, in order of steps."""
        for row in rows:
            if row["generation"] > self._generation:  # it may do steps again
                self._generation, self._told = row["generation"], 0
                self._rows.clear()
            if row["step"] > self._told and row["generation"] == self._generation:
                self._rows.setdefault(row["step"], {})[row["rank"]] = row
        whole: list[Shares] = []
        for step in sorted(self._rows):
            of_step = list(self._rows[step].values())
            if len(of_step) < of_step[0]["world_size"] and len(self._rows) <= self.MOST_STEPS:
                break
            del self._rows[step]
            self._told = step
            time = max(row["time"] for row in of_step)
            whole.append(Shares(step, time, shares(of_step), peaks_of(of_step)))
        return whole
