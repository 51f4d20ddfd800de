"""What the feed leaves in the run directory: its plan, and what each window gave.

`data.json` is written whole by the feed alone. Losing it costs reading again, never a row; what a
window gives is a function of the plan, so it holds for every later start of the run.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from elastic.data.plan import Plan, PlannedFile, differences, told
from elastic.data.source import is_uri
from elastic.data.stream import WindowKey
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, reach_folder, read_json, write_json
from elastic.store.remote import shown_uri

NAME = "data.json"


@dataclass
class FeedRecord:
    """The record of one run, in memory; `write` publishes it. Any thread may call its methods."""

    plan: Plan
    folder: Folder
    counts: dict[WindowKey, int] = field(default_factory=dict[WindowKey, int])
    skipped: dict[WindowKey, tuple[int, ...]] = field(
        default_factory=dict[WindowKey, tuple[int, ...]]
    )
    """Units that were left out of a window when it was read first."""
    began_in: str | None = None
    """What relative paths were relative to when the run began; None in records of before."""
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    """Unit -> of its bytes when it was read first."""
    version: int = 1
    """Grows with what is news; `written` is the last one that has been published."""
    written: int = 0
    last_skip: int = 0
    """The version in which a row group was left out last."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_written(self) -> bool:
        return self.written == self.version

    @property
    def has_published_skips(self) -> bool:
        return self.last_skip <= self.written

    def add(self, key: WindowKey, count: int, skipped: Iterable[int]) -> bool:
        """A window has been read; True if that is news (what was planned never is)."""
        if key in self.counts or self.plan.source.has_planned_counts:
            return False
        with self.changing:
            self.counts[key] = count
            self.version += 1
            if units := tuple(skipped):
                self.skipped[key] = units
                self.last_skip = self.version
        return True

    def keep(self, checksums: Mapping[int, int]) -> None:
        """Of units that have been read; those that were read before have none other."""
        with self.changing:
            if checksums.keys() - self.checksums.keys():
                self.checksums.update(checksums)
                self.version += 1

    def checksums_of(self, key: WindowKey) -> dict[int, int]:
        """Of the units of a window, as far as they were read before."""
        units = (unit.index for unit in self.plan.windows(key.epoch)[key.window])
        return {unit: self.checksums[unit] for unit in units if unit in self.checksums}

    @property
    def num_left_out(self) -> int:
        """Row groups that were left out of some window."""
        return len({unit for units in self.skipped.values() for unit in units})

    def write(self) -> None:
        """Publish what is news, once there is a run directory; what came before the call has been
        published when it returns."""
        with self.writing:
            if self.is_written or not self.folder.exists("config.json"):
                return
            with self.changing:
                version, content = self.version, self.to_json()
            write_json(self.folder, NAME, content)
            self.written = version

    def to_json(self) -> dict[str, Any]:
        return {
            "plan_sha256": self.plan.hash,
            "plan": self.plan.to_json(),
            "began_in": self.began_in,
            "files": [[*astuple(f)] for f in self.plan.files],
            "columns": self.plan.columns,
            "counts": [[k.epoch, k.window, n] for k, n in sorted(self.counts.items())],
            "skipped": [[k.epoch, k.window, *u] for k, u in sorted(self.skipped.items())],
            "checksums": sorted(self.checksums.items()),
        }


def open_record(plan: Plan, place: str) -> FeedRecord:
    """The record in the run directory `place`, new if there is none.

    WrongInput if the run began with another plan: says what changed. OSError if the store is away.
    """
    folder, shown = reach_folder(place), shown_uri(place)
    found = read_json(folder, NAME)
    if found is None:
        return FeedRecord(plan, folder, began_in=plan.source.place(""))
    try:
        return _record_of(plan, folder, shown, found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"is damaged: it has no sound {error.args[0]!r:.60}"
        raise WrongInput(f"{shown}/{NAME} {what}; bring it back, or use another --name") from error


def _record_of(plan: Plan, folder: Folder, place: str, found: dict[str, Any]) -> FeedRecord:
    """Raises whatever a damaged one makes of it."""
    if "plan_sha256" not in found:
        raise WrongInput(
            f"the run {place} began with other data than Parquet files; use another --name"
        )
    plan = named_as_before(plan, found)
    if plan.source.on_bad_file == "skip":  # what is missing or damaged now is left out, not refused
        plan = as_it_was(plan, found)
    if found["plan_sha256"] != plan.hash:
        changes = told(differences(found["plan"], plan.to_json()))
        raise WrongInput(
            f"the data changed since the run {place} began: {changes}. Bring it back as it was, "
            "or use another --name"
        )
    if found["skipped"] and plan.source.on_bad_file == "raise":
        raise WrongInput(
            f"the run {place} left out row groups in {len(found['skipped'])} windows; go on with "
            'on_bad_file="skip", or use another --name'
        )
    record = FeedRecord(plan, folder, began_in=found.get("began_in"))
    record.counts = {WindowKey(e, w): n for e, w, n in rows_in(found, "counts")}
    record.skipped = {WindowKey(e, w): tuple(units) for e, w, *units in rows_in(found, "skipped")}
    checksums = rows_in({"checksums": [], **found}, "checksums")  # records of before have none
    record.checksums = {unit: checksum for unit, checksum in checksums}
    record.written = record.version
    return record


def file_of(
    path: str, inside: str, root: int, size_bytes: int, row_groups: list[list[int]], problem: str
) -> PlannedFile:
    """A row of the record. ValueError or TypeError for one that none of ours is."""
    if not all(isinstance(text, str) for text in cast("list[object]", [path, inside, problem])):
        raise ValueError("files")
    rows_in({"files": [[root, size_bytes], *row_groups]}, "files")
    groups = tuple((rows, size) for rows, size in row_groups)
    return PlannedFile(path, inside, root, size_bytes, groups, problem)


def rows_in(found: dict[str, Any], name: str) -> list[list[int]]:
    """ValueError if they are no lists of numbers, as all of them are."""
    rows: list[list[int]] = found[name]
    if not all(type(number) is int and number >= 0 for row in rows for number in row):
        raise ValueError(name)
    return rows


def named_as_before(plan: Plan, found: Mapping[str, Any]) -> Plan:
    """The plan with the record's names of files that are the same: a path of the record may be
    absolute (of a run of before), or relative to a folder that has moved away from its data."""
    recorded = found["plan"]["files"].keys()
    unseen = recorded - {f.path for f in plan.files}
    began_in = found.get("began_in") or ""
    names = {str(Path(began_in, name)): name for name in unseen if not is_uri(name)}

    def named(file: PlannedFile) -> PlannedFile:
        if is_uri(file.path) or file.path in recorded:
            return file
        return replace(file, path=names.get(plan.source.place(file.inside), file.path))

    files = tuple(sorted(map(named, plan.files), key=lambda file: file.path))
    if files == plan.files:
        return plan
    columns = found.get("columns", plan.columns)  # in the order of the first file
    return replace(plan, files=files, columns=tuple(columns))


def as_it_was(plan: Plan, found: dict[str, Any]) -> Plan:
    """The plan that the record tells of, if files that are gone or changed are all that differs."""
    now = {f.path: f for f in plan.files}
    files = tuple(file_of(*row) for row in found["files"])
    files = tuple(
        replace(f, inside=now[f.path].inside, root=now[f.path].root) if f.path in now else f
        for f in files
    )
    before = replace(plan, files=files, columns=tuple(found["columns"]))
    is_more = {f.path for f in plan.files} - {f.path for f in files}
    return before if before.hash == found["plan_sha256"] and not is_more else plan
