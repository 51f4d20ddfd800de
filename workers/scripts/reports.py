"""What a script has reported: checkpoints of opaque files in the run directory, published whole.

A checkpoint counts once it is in the snapshot, which is Ray Train's own file: Ray's `Result` reads
it, and a run that began under Ray Train goes on from it. Who votes on a report is not here.
"""

import hashlib
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic.data.place import Places
from elastic.protocol.step_record import StepMetrics
from elastic.store.files import Folder, encode, reach_folder, sync_directory, write_json
from elastic.store.remote import patiently

SNAPSHOT = "checkpoint_manager_snapshot.json"
MANIFESTS = "script"
"""The folder of what belongs to a script run and not into its checkpoints."""
REPORTS = "reports.jsonl"
EPOCHS = "epochs.json"
"""In the folder of `MANIFESTS`: which epoch is next, and the file of what goes on."""
PREFIX = "checkpoint_"
CHUNK_BYTES = 1 << 22
NAME = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]{0,199}")
"""Of a checkpoint: one folder."""
OWN_FOLDERS = frozenset(("checkpoints", "logs", "tensorboard", "anatomy", "journal", MANIFESTS))
"""Of a run directory; its files have endings that are none of a checkpoint's either."""
NEVER_FEWER = 2
"""So many of the newest checkpoints stay: the newest may turn out to be damaged."""


@dataclass(frozen=True, slots=True)
class File:
    """Of a checkpoint, by its path in it."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Trained:
    """How far a script is, by the steps of its optimizers."""

    steps: int = 0
    samples: int = 0


UNTRAINED = Trained()


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay: the best so many by a metric, or the newest; the newest two always
    do."""

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def order(self, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The worst first; who lacks the metric is worse than who has it."""
        attribute = self.score_attribute
        if attribute is None:
            return list(entries)
        sign = 1 if self.score_order == "max" else -1

        def score(entry: dict[str, Any]) -> tuple[bool, float]:
            value = entry["metrics"].get(attribute)
            is_number = isinstance(value, int | float) and math.isfinite(value)
            return is_number, sign * float(value) if is_number else 0.0

        return sorted(entries, key=score)

    def kept(self, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of entries in the order of their reports."""
        if self.num_to_keep is None:
            return list(entries)
        best = self.order(entries)[-self.num_to_keep :]
        newest = list(entries)[-NEVER_FEWER:]
        return [entry for entry in entries if entry in best or entry in newest]


def paths_in(source: Path) -> list[str]:
    """Of all files in a folder, from there."""
    found = (p for p in source.rglob("*") if p.is_file())
    return sorted(p.relative_to(source).as_posix() for p in found)


class Reports:
    """The reports of one run, from one worker's side."""

    def __init__(self, place: str, retention: Retention, ray_version: str) -> None:
        """place: the run directory. ray_version: goes into the snapshot, as Ray wants it."""
        self.folder: Folder = reach_folder(place)
        self._retention, self._ray_version = retention, ray_version
        self._verified: set[str] = set()
        self.unrecorded: deque[StepMetrics] = deque()
        """Steps of this process's calls that are not known to be on record."""
        self.has_moved = False
        """Whether a call that was unwound had come to a collective or a report."""
        self.has_epochs = False
        """The script counts them by ours, and one had ended when the call began; on the lowest rank
        of then."""
        self.passes = Places()
        """Over Ray Data's sets, as far as the call at hand is in them here."""
        self._lines: list[bytes] = []
        """Of reports.jsonl that are not written yet, where storage cannot append."""

    def unrecorded_until(self, steps: int) -> tuple[StepMetrics, ...]:
        """In order. A call begins behind so many: later ones are none of its."""
        while self.unrecorded and self.unrecorded[-1].step > steps:
            self.unrecorded.pop()
        return tuple(self.unrecorded)

    # --- what counts ------------------------------------------------------------------
    def entries(self) -> list[dict[str, Any]]:
        """Of the checkpoints that count, by the order of their reports."""
        found = self._snapshot()
        indices = found.get("checkpoint_report_indices", [])
        results = zip(found.get("checkpoint_results", []), indices, strict=True)
        return [{**entry, "index": index} for entry, index in sorted(results, key=lambda r: r[1])]

    def newest(self) -> str | None:
        """The name of the newest checkpoint whose files are what was reported; None: there is
        none. A damaged one is told and passed over. OSError if the storage is away for long."""
        for entry in reversed(self.entries()):
            name = entry["checkpoint_dir_name"]
            if not (damage := self._damage_of(name)):
                return name
            print(f"elastic: checkpoint {name} is damaged: {damage}", file=sys.stderr)
        return None

    def _snapshot(self) -> dict[str, Any]:
        if not self.folder.exists(SNAPSHOT):
            return {}
        return json.loads(self.folder.read(SNAPSHOT))

    def passes_at(self, name: str) -> dict[str, int]:
        """As it was published with. Of Ray's own nothing is known."""
        return self._content(manifest_of(name)).get("passes", {})

    def trained_at(self, newest: str | None) -> Trained:
        """Of a call that begins now. newest: the checkpoint that it begins at; a script that counts
        its epochs by ours begins at the newest of those."""
        found = self._content(f"{MANIFESTS}/{EPOCHS}")
        self.has_epochs = bool(found)
        if not found and newest is not None:
            found = self._content(manifest_of(newest))
        return Trained(**found.get("trained", {}))

    def _content(self, name: str) -> dict[str, Any]:
        """Of a file of JSON, {} if there is none."""
        return json.loads(self.folder.read(name)) if self.folder.exists(name) else {}

    def _damage_of(self, name: str) -> str:
        """In words; empty if it has none. One of Ray's own has no checksums."""
        if name in self._verified:
            return ""
        if not self.folder.exists(manifest_of(name)):
            return "" if self.folder.at(name).is_there else "it is not there"
        for entry in json.loads(self.folder.read(manifest_of(name)))["files"]:
            file = File(**entry)
            read = partial(self._checksum, name, file.path)
            if (found := patiently(read)) is None:
                return f"{file.path} is missing"
            if found != file:
                return f"{file.path} is not what was reported"
        self._verified.add(name)
        return ""

    def _checksum(self, name: str, path: str) -> File | None:
        """None if it is not there, which a store that is away does not say."""
        try:
            return checksum(self.folder.at(name), path)
        except FileNotFoundError:
            return None

    # --- a checkpoint comes ---------------------------------------------------------------
    def clear(self, name: str) -> None:
        """Nothing of an attempt that was not whole stays under this name. ValueError for one that
        counts, and for a name that is none of a checkpoint."""
        if not NAME.fullmatch(name) or name in OWN_FOLDERS or self._is_file(name):
            raise ValueError(
                f"report(): checkpoint_dir_name {name!r} must be the name of one folder, of "
                "letters, digits and _ . = + -, and none that the run directory has"
            )
        if any(entry["checkpoint_dir_name"] == name for entry in self.entries()):
            raise ValueError(
                f"report(): checkpoint_dir_name {name!r} has been reported before; each report "
                "needs a name of its own"
            )
        if self.folder.at(name).is_there:
            self.folder.at(name).delete_all()

    def _is_file(self, name: str) -> bool:
        return self.folder.exists(name) and name not in self.folder.folders()

    def sweep(self) -> None:
        """Before a call: what was never whole goes."""
        listed = {entry["checkpoint_dir_name"] for entry in self.entries()}
        for name in self.folder.folders():
            if name.startswith(PREFIX) and name not in listed:
                self.folder.at(name).delete_all()

    def store(self, source: Path, name: str, paths: Iterable[str]) -> list[File]:
        """Bring these files there; they are durable then, and count for nothing yet."""
        return [copy_file(source, self.folder.at(name), path) for path in paths]

    def publish(
        self,
        name: str,
        files: Sequence[File],
        metrics: dict[str, Any],
        trained: Trained = UNTRAINED,
    ) -> None:
        """From now on the checkpoint counts. Old ones go."""
        content = {"files": [asdict(file) for file in files], "passes": self.passes.numbers()}
        content["trained"] = asdict(trained)
        self.folder.at(MANIFESTS).create()
        write_json(self.folder, manifest_of(name), content)
        before = self._snapshot().get("current_report_index", 0)
        entry = {"version": 0, "checkpoint_dir_name": name, "metrics": metrics, "index": before}
        entries = [*self.entries(), entry]
        kept = self._retention.kept(entries)
        self.folder.write(SNAPSHOT, encode(self._snapshot_of(kept, before + 1)))
        for old in entries:
            if old not in kept:
                self.folder.at(old["checkpoint_dir_name"]).delete_all()
                if self.folder.exists(manifest_of(old["checkpoint_dir_name"])):
                    self.folder.delete(manifest_of(old["checkpoint_dir_name"]))

    def _snapshot_of(self, entries: list[dict[str, Any]], next_index: int) -> dict[str, Any]:
        def result(entry: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in entry.items() if key != "index"}

        ordered = self._retention.order(entries)
        return {
            "ray_version": self._ray_version,
            "checkpoint_results": [result(entry) for entry in ordered],
            "checkpoint_report_indices": [entry["index"] for entry in ordered],
            "latest_checkpoint_result": result(entries[-1]),
            "pending_training_results": [],
            "pending_validation_specs": [],
            "current_report_index": next_index,
            "validated_checkpoint_dir_names": [],
            "timed_out_validation_checkpoint_dir_names": [],
            "failed_validation_checkpoint_dir_names": [],
        }

    # --- every report ---------------------------------------------------------------------
    def log(self, fields: dict[str, Any]) -> None:
        """A line of reports.jsonl, by the lowest rank."""
        line = json.dumps({**fields, "time": time.time()}, default=str).encode() + b"\n"
        if self.folder.local is None:
            self._lines.append(line)
            return
        with (self.folder.local / REPORTS).open("ab") as file:
            file.write(line)

    def flush_log(self) -> None:
        """Where storage cannot append."""
        if self._lines:
            before = self.folder.read(REPORTS) if self.folder.exists(REPORTS) else b""
            self.folder.write(REPORTS, before + b"".join(self._lines))
            self._lines.clear()

    # --- the script's own exceptions ------------------------------------------------------
    def add_failure(self, launch: str, generation: int, rank: int, text: str) -> int:
        """Remember that the script has raised. Gives in how many calls it has in this launch of the
        run, this one included: ranks that raise in the same call are one failure."""
        self.folder.at(MANIFESTS).create()
        name = f"failure-{launch}-{generation}-{rank}.json"
        write_json(self.folder.at(MANIFESTS), name, {"rank": rank, "error": text})
        names = self.folder.at(MANIFESTS).names()
        return len({n.rpartition("-")[0] for n in names if n.startswith(f"failure-{launch}-")})


def new_name() -> str:
    """Of a checkpoint, as Ray Train makes it."""
    return f"{PREFIX}{time.strftime('%Y-%m-%d_%H-%M-%S')}.{time.time_ns() % 10**9:09}"


def manifest_of(name: str) -> str:
    return f"{MANIFESTS}/{name}.json"


def copy_file(source: Path, folder: Folder, path: str) -> File:
    """Durable when it returns, where the storage is local."""
    place = folder.path_of(path)
    folder.filesystem.create_dir(place.rpartition("/")[0], recursive=True)
    digest, size_bytes = hashlib.sha256(), 0
    with (source / path).open("rb") as file, folder.filesystem.open_output_stream(place) as out:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
            out.write(chunk)
    if folder.local is not None:
        written = Path(place)
        descriptor = os.open(written, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(written.parent)
    return File(path, size_bytes, digest.hexdigest())


def checksum(folder: Folder, path: str) -> File:
    digest, size_bytes = hashlib.sha256(), 0
    with folder.filesystem.open_input_stream(folder.path_of(path)) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return File(path, size_bytes, digest.hexdigest())
