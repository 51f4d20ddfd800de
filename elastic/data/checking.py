"""What the sample record of a run must say, from its plan; and whether it does.

A planned stream is checked from the footers alone; where transforms decide what a window gives,
the windows are read again.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.data.permutation import permutation
from elastic.data.plan import Plan
from elastic.data.reading import WindowRows, read_window
from elastic.data.record import FeedRecord
from elastic.data.stream import WindowKey


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with the record of a step."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of `check`."""

    steps: int
    rows: int
    epochs: int
    """Those that were used to their end."""
    findings: tuple[Finding, ...]


class Repeated(ValueError):
    """An epoch of the stream gives an id twice."""


def check(
    lines: Iterable[Mapping[str, Any]], stream: Iterator[tuple[int, np.ndarray]], batch: int
) -> Checked:
    """Compare samples.jsonl with a stream of (epoch, row ids), which is taken as far as needed.

    batch: rows per step.
    """
    findings: list[Finding] = []
    pending = np.empty(0, np.int64)
    step, epoch, taken = 0, 0, 0
    epoch_ends: list[int] = []
    for line in lines:
        step += 1
        if line["step"] != step:
            findings.append(Finding(step, f"the record goes on with step {line['step']}"))
            break
        while len(pending) < batch:
            before, (epoch, ids) = epoch, next(stream)
            epoch_ends += [taken] * (epoch - before)
            taken += len(ids)
            pending = np.concatenate([pending, ids])
        rows, pending = pending[:batch], pending[batch:]
        if (line["first"], line["count"]) != ((step - 1) * batch, batch):
            where = f"{line['count']} rows from position {line['first']}"
            findings.append(Finding(step, f"says {where}, not {batch} from {(step - 1) * batch}"))
        elif line["sha256"] != hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest():
            findings.append(Finding(step, "used other rows than the plan has there"))
    if not len(pending) and step:  # an epoch may end just here
        before, (epoch, _) = epoch, next(stream)
        epoch_ends += [taken] * (epoch - before)
    epochs = sum(end <= step * batch for end in epoch_ends)
    return Checked(step, step * batch, epochs, tuple(findings))


def planned_stream(record: FeedRecord) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, ids of consecutive rows) of the stream, without end.

    Repeated if a row, or a document, comes twice in an epoch. BadData for what cannot be read
    again.
    """
    plan, length = record.plan, record.plan.source.row_length
    place, epoch = 0, 0
    while True:
        seen: list[np.ndarray] = []
        for window in range(len(plan.windows(epoch))):
            rows = _rows(plan, record, WindowKey(epoch, window))
            elements = np.arange(-place % length, rows.count, length)
            ids = rows.ids_of(elements) if len(elements) else np.empty(0, np.int64)
            place += rows.count
            seen.append(rows.ids)  # documents', where tokens are packed: theirs never coincide
            yield epoch, ids
        whole = np.concatenate(seen)
        if len(np.unique(whole)) != len(whole):
            raise Repeated(f"epoch {epoch} of the plan gives a row twice")
        epoch += 1


def _rows(plan: Plan, record: FeedRecord, key: WindowKey) -> WindowRows:
    if not plan.source.has_planned_counts:
        left_out = record.skipped.get(key, ())
        known = record.checksums_of(key)
        return read_window(plan, key.epoch, key.window, left_out, known)[0]
    units = plan.windows(key.epoch)[key.window]
    parts = [np.arange(u.first_row, u.first_row + u.num_rows, dtype=np.int64) for u in units]
    ids = np.concatenate(parts)
    if plan.source.shuffle:
        ids = ids[permutation(len(ids), "rows", plan.seed, key.epoch, key.window)]
    return WindowRows(_NoTable(len(ids)), ids, None)


@dataclass(frozen=True, slots=True)
class _NoTable:
    """Stands for a table whose columns nobody asks for."""

    num_rows: int
