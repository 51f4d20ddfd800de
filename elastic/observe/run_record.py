"""All that a run's files tell, for a report: steps, decisions, anatomy, samples, as numbers.

Whatever is damaged or missing is left out and noted: a report is of any run directory, also of one
that has just begun. What it looks like is report_page.py's and charts.py's.
"""

import contextlib
import gc
import json
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, cast

from elastic.chaos.timeline import Timeline, follow
from elastic.control.replay import JOURNAL_TYPES, Entry, Started
from elastic.observe.anatomy import NAME as ANATOMY
from elastic.observe.anatomy import PARTS
from elastic.observe.series import Floats, np
from elastic.protocol.encoding import decode
from elastic.protocol.errors import WrongInput, in_words
from elastic.protocol.step_record import OF_OPTIMIZER
from elastic.store.files import Folder, read_json
from elastic.store.journal import as_object, joined, read_backwards
from elastic.store.run_directory import ROLLED_BACK, as_dict

MOST_SCALARS = 24
"""Of the user's own: as many curves can be looked at."""
MOST_REPORTS = 100
"""Of a script's: so many are listed."""
LINES_AT_ONCE = 1000
NUM_BINS = 400
"""Of shares over time, at most."""


@dataclass(frozen=True)
class Steps:
    """Lines of metrics.jsonl in their order. All arrays have shape (steps,), float64."""

    columns: dict[str, Floats]
    """Those of COLUMNS, time in Unix seconds; NaN where there is none."""
    user: dict[str, Floats]
    """The user's scalars by name; NaN where a step has none."""
    num_unshown: int = 0
    """Names beyond MOST_SCALARS."""

    @property
    def count(self) -> int:
        return len(self.columns["step"])


@dataclass(frozen=True)
class Decided:
    """A decision with its reason; `at` is Unix time."""

    at: float
    generation: int
    step: int
    reason: str


@dataclass(frozen=True)
class Anatomy:
    """Rows of anatomy.jsonl, summed in equal parts of the time that they cover."""

    edges: Floats
    """Unix seconds, shape (bins + 1,)."""
    seconds: dict[str, Floats]
    """Of all ranks in each bin, by part; shape (bins,)."""
    memory_bytes: dict[str, Floats]
    """The highest peak in each bin, by `memory` and `gpu_memory`; NaN without a row."""
    ranks: dict[int, dict[str, float]]
    """By rank: seconds by part, and its `steps`."""


@dataclass(frozen=True)
class Samples:
    """What samples.jsonl says of the order of samples."""

    num_steps: int = 0
    first: int = 0
    end: int = 0
    """One after the last sample."""
    breaks: tuple[int, ...] = ()
    """Steps that do not begin where the step before them ended; the first 20."""
    num_breaks: int = 0


@dataclass(frozen=True)
class RunRecord:
    name: str
    config: dict[str, Any]
    status: dict[str, Any]
    result: dict[str, Any]
    """Empty while the run has none."""
    data: dict[str, Any]
    steps: Steps
    rolled_back: Steps
    timeline: Timeline | None
    """None: there is no journal yet, or it cannot be followed."""
    decisions: list[Decided]
    anatomy: Anatomy | None
    samples: Samples
    reports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """A script's newest lines of reports.jsonl, the newest last."""
    notes: list[str] = field(default_factory=list[str])
    """What of the files could not be used, a sentence each."""

    @property
    def is_script(self) -> bool:
        """What its runs commit, and may lose, are reports with a checkpoint."""
        return any(found.get("level") is not None for found in (self.status, self.result))

    @property
    def began(self) -> float:
        """Unix seconds; where every time of the report counts from."""
        if self.timeline is not None:
            return self.timeline.began
        times = self.steps.columns["time"]
        times = times[np.isfinite(times)]
        return float(times.min()) if len(times) else 0.0


def read_record(folder: Folder) -> RunRecord:
    """OSError if the store is away."""
    with no_collection():
        return read_all(folder)


@contextlib.contextmanager
def no_collection() -> Generator[None]:
    """Millions of values are made, none of them in a cycle: to look for some takes a third of the
    time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_all(folder: Folder) -> RunRecord:
    notes: list[str] = []
    timeline, decisions = journal_of(folder, notes)
    return RunRecord(
        name=folder.name,
        config=json_of(folder, "config.json", notes),
        status=json_of(folder, "status.json", notes),
        result=json_of(folder, "result.json", notes),
        data=json_of(folder, "data.json", notes),
        steps=steps_of(folder, "metrics.jsonl", notes),
        rolled_back=steps_of(folder, ROLLED_BACK, notes),
        timeline=timeline,
        decisions=decisions,
        anatomy=anatomy_of(folder, notes),
        samples=samples_of(folder, notes),
        reports=[*islice(read_backwards(folder, "reports.jsonl"), MOST_REPORTS)][::-1],
        notes=notes,
    )


def json_of(folder: Folder, name: str, notes: list[str]) -> dict[str, Any]:
    try:
        return as_dict(read_json(folder, name))
    except WrongInput as error:
        notes.append(str(error))
        return {}


def lines_of(folder: Folder, name: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Whole lines, segments in a bucket included; damaged ones are counted."""
    lines = joined(folder, name).split(b"\n")
    lines.pop()  # empty, or torn: the run goes on
    num_damaged = 0
    for start in range(0, len(lines), LINES_AT_ONCE):
        for value in objects(lines[start : start + LINES_AT_ONCE]):
            if value is None:
                num_damaged += 1
            else:
                yield value
    if num_damaged:
        notes.append(f"{name}: damaged lines are left out, {num_damaged} of {len(lines)}")


def objects(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Each line as `as_object` has it; together they take half the time."""
    try:
        values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) == len(lines) and all(type(value) is dict for value in values):
        return values
    return [as_object(line) for line in lines]


def number(value: object) -> float:
    """NaN for what is no finite number."""
    if type(value) is float:  # most are
        return value if -math.inf < value < math.inf else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def whole(value: object) -> int:
    """0 for what is no reasonable whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if abs(value) < 1 << 62 else 0


# --- metrics.jsonl -----------------------------------------------------------------
COLUMNS = ("step", "time", "loss", "world_size", "samples", "step_s", *OF_OPTIMIZER)


def steps_of(folder: Folder, name: str, notes: list[str]) -> Steps:
    columns: dict[str, list[float]] = {column: [] for column in COLUMNS}
    pairs = list(columns.items())
    user: dict[str, list[tuple[int, float]]] = {}
    unshown: set[str] = set()
    for i, line in enumerate(lines_of(folder, name, notes)):
        for column, values in pairs:
            values.append(number(line.get(column)))
        for key, value in as_dict(line.get("user")).items():
            if math.isnan(scalar := number(value)):
                continue
            if key in user or len(user) < MOST_SCALARS:
                user.setdefault(key, []).append((i, scalar))
            elif len(unshown) < 10_000:
                unshown.add(key)
    arrays = {column: np.array(values, dtype=float) for column, values in columns.items()}
    count = len(arrays["step"])
    return Steps(arrays, {key: spread(user[key], count) for key in sorted(user)}, len(unshown))


def spread(found: list[tuple[int, float]], count: int) -> Floats:
    """An array of shape (count,), NaN where nothing was found."""
    array = np.full(count, math.nan)
    pairs = np.array(found)
    array[pairs[:, 0].astype(int)] = pairs[:, 1]
    return array


# --- journal.jsonl -----------------------------------------------------------------
def journal_of(folder: Folder, notes: list[str]) -> tuple[Timeline | None, list[Decided]]:
    parts: list[list[Started | Entry]] = []
    decisions: list[Decided] = []
    last_at = math.nan
    timeline: Timeline | None = None
    try:
        for line in lines_of(folder, "journal.jsonl", notes):
            last_at = number(line.get("at"))
            if "entry" not in line:
                continue
            if reason := line["entry"].get("reason"):
                generation, step = whole(line.get("generation")), whole(line.get("step"))
                decisions.append(Decided(last_at, generation, step, str(reason)))
            value = decode(line["entry"], JOURNAL_TYPES)
            if isinstance(value, Started) or not parts:
                parts.append([])
            parts[-1].append(value)
        timeline = follow(parts, last_at) if parts else None
    except OSError:
        raise
    except Exception as error:  # a decision takes the types of its event's fields for granted
        notes.append(f"journal.jsonl cannot be followed: {in_words(error)}")
    if timeline is not None and not is_sound(timeline):
        notes.append("journal.jsonl tells of times that cannot be")
        timeline = None
    return timeline, decisions


def is_sound(timeline: Timeline) -> bool:
    """Whether there is a time that can be drawn."""
    if not timeline.spans:
        return False
    wall_s = timeline.ended - timeline.began
    times = [at for span in timeline.spans for at in (span.began, span.ended)]
    return math.isfinite(wall_s) and wall_s > 0 and bool(np.isfinite(np.array(times)).all())


# --- anatomy.jsonl -----------------------------------------------------------------
MEASURED = itemgetter("time", "rank", "steps", "memory_bytes", *(f"{part}_s" for part in PARTS))
NUMBERS = {int, float}


def anatomy_of(folder: Folder, notes: list[str]) -> Anatomy | None:
    """Rows as `is_row` would have them, checked all at once."""
    found: list[tuple[Any, ...]] = []
    gpu: list[float] = []
    for line in lines_of(folder, ANATOMY, notes):
        try:
            values = MEASURED(line)
        except KeyError:
            continue
        if {*map(type, values)} <= NUMBERS and min(values) >= 0 and max(values) < 1e300:
            found.append(values)
            gpu.append(number(line.get("gpu_memory_bytes")))
    all_rows = np.array(found, dtype=float).reshape(-1, 4 + len(PARTS))
    is_sound = np.isfinite(all_rows).all(axis=1) & (all_rows >= 0).all(axis=1)
    rows, gpu_bytes = all_rows[is_sound], np.array(gpu)[is_sound]
    if not len(rows):
        return None
    time, rank, steps, memory_bytes = rows.T[:4]
    parts = dict(zip(PARTS, rows.T[4:], strict=True))
    numbers, of_rank = np.unique(rank, return_inverse=True)
    num_bins = min(NUM_BINS, max(4, len(rows) // (4 * len(numbers))))
    edges = np.linspace(time.min(), time.max() + 1e-3, num_bins + 1)
    bins = np.clip(np.searchsorted(edges, time, "right") - 1, 0, num_bins - 1)
    sums = {"steps": np.bincount(of_rank, steps)}
    sums |= {part: np.bincount(of_rank, values) for part, values in parts.items()}
    return Anatomy(
        edges=edges,
        seconds={part: np.bincount(bins, values, num_bins) for part, values in parts.items()},
        memory_bytes={
            "memory": highest(memory_bytes, bins, num_bins),
            "gpu_memory": highest(gpu_bytes, bins, num_bins),
        },
        ranks={
            int(number): {key: float(values[i]) for key, values in sums.items()}
            for i, number in enumerate(numbers)
        },
    )


def highest(values: Floats, bins: Floats, num_bins: int) -> Floats:
    """Of each bin; NaN without a value."""
    found = np.full(num_bins, math.nan)
    is_there = np.isfinite(values)
    np.fmax.at(found, bins[is_there], values[is_there])
    return found


# --- samples.jsonl -----------------------------------------------------------------
def samples_of(folder: Folder, notes: list[str]) -> Samples:
    num_steps = first = end = num_breaks = 0
    breaks: list[int] = []
    for line in lines_of(folder, "samples.jsonl", notes):
        step, begin, count = (whole(line.get(key)) for key in ("step", "first", "count"))
        if not num_steps:
            first = begin
        elif begin != end:
            num_breaks += 1
            breaks += [step] if len(breaks) < 20 else []
        num_steps, end = num_steps + 1, begin + count
    return Samples(num_steps, first, end, tuple(breaks), num_breaks)


def as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
