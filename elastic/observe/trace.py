"""One step of all ranks as a Chrome trace, which Perfetto and chrome://tracing show.

A row for each rank, a slice for each phase of its main thread.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

from elastic.observe.anatomy import NAME, PARTS, Row, is_row
from elastic.store.files import Folder
from elastic.store.journal import read_backwards

MARGIN_ROWS = 4096
"""Ranks send their rows at different times: so many of earlier steps may follow a later one's."""
MOST_NEAR = 8
"""Of the steps that are told where the one that was asked for is not traced."""
Span = tuple[str, float]


def rows_of(folder: Folder, step: int | None) -> tuple[list[Row], list[int]]:
    """The traced rows that end with `step` (None: the newest), one per rank, by rank, of the newest
    generation that did it; and some other traced steps, nearest first. Reads from the end."""
    found: dict[int, Row] = {}
    near: list[int] = []
    num_earlier = 0
    for row in traced(folder):
        step = int(row["step"]) if step is None else step
        if row["step"] == step:
            if not found or row["generation"] == next(iter(found.values()))["generation"]:
                found.setdefault(row["rank"], row)
            continue
        if row["step"] not in near:
            near = nearest(step, [*near, row["step"]])
        num_earlier += row["step"] < step
        if num_earlier > MARGIN_ROWS:
            break
    return [found[rank] for rank in sorted(found)], near


def nearest(step: int, steps: Iterable[int]) -> list[int]:
    """The nearest first, of two that are as near the earlier one."""
    return heapq.nsmallest(MOST_NEAR, steps, key=lambda s: (abs(s - step), s))


def traced(folder: Folder) -> Iterator[Row]:
    return (row for row in read_backwards(folder, NAME) if is_row(row) and spans_of(row))


def spans_of(row: Row) -> list[Span]:
    """Empty if they are none."""
    spans: list[Span] = []
    for each in row["spans"]:
        pair = cast("list[Any]", each) if isinstance(each, list) else []
        if len(pair) != 2 or not isinstance(pair[0], str):
            return []
        seconds = pair[1]
        is_time = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
        if not is_time:
            return []
        spans.append((pair[0], float(seconds)))
    return spans


def trace_of(rows: Iterable[Row], run: str) -> dict[str, Any]:
    """rows: of one step. All ranks leave the vote together: that is where their times meet, whose
    clocks may differ."""
    rows = list(rows)
    ends = [voted_at(spans_of(row)) for row in rows]
    last = max(ends, default=0.0)
    events: list[dict[str, Any]] = [named("process_name", f"{run}, step {rows[0]['step']}", 0)]
    for row, end in zip(rows, ends, strict=True):
        rank = row["rank"]
        events.append(named("thread_name", f"rank {rank} ({row['worker']})", rank))
        at = last - end
        for phase, seconds in spans_of(row):
            slice_ = {"ph": "X", "name": phase, "pid": 0, "tid": rank}
            events.append({**slice_, "ts": 1e6 * at, "dur": 1e6 * seconds})
            at += seconds
    about = {f"rank {row['rank']}": told(row) for row in rows}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def voted_at(spans: list[Span]) -> float:
    """Seconds from the step's begin to the end of its vote; 0 for a trace that is cut before."""
    at = end = 0.0
    for phase, seconds in spans:
        at += seconds
        if phase == "vote":
            end = at
    return end


def named(kind: str, name: str, rank: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": rank, "args": {"name": name}}


def told(row: Row) -> dict[str, Any]:
    keys = ("step", "steps", "generation", "worker", "step_s", *(f"{part}_s" for part in PARTS))
    return {key: row[key] for key in (*keys, "memory_bytes", "gpu_memory_bytes")}
