"""`RunDirectory`: the files of one run, `<storage>/<name>/`, written by its controller.

Readers (status, watch, replay, resume) use files.py and journal.py; decisions are elsewhere.
"""

import errno
import fcntl
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from elastic.protocol.errors import WrongInput
from elastic.protocol.step_record import METRICS_FIELDS, MORE_METRICS
from elastic.store.before import Before
from elastic.store.catalogue import folder_name
from elastic.store.claim import Claim
from elastic.store.files import (
    Folder,
    Kinds,
    check_kinds,
    encode,
    first_line,
    open_own,
    place_of,
    reach_folder,
    write_json,
)
from elastic.store.journal import LineFile, segments
from elastic.store.remote import AWAY, is_refused, shown_uri
from elastic.store.step_lines import end_of_step, end_without_moved, last_step

UPLOAD_EVERY_S = 5.0
REMOTE_STATUS_EVERY_S = 10.0
ROLLED_BACK = "metrics.rolledback.jsonl"
OF_STEPS = ("metrics.", "commits.")
LOCK = ".lock"
"""Held by the process that writes the run."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

STATUS_KINDS: Kinds = {
    "phase": str,
    "generation": int,
    "world_size": int,
    "step": int,
    "steps": int,
    "committed_checkpoint": int | None,
    "workers": list,
    "standby": list,
    "controller": dict,
    "reason": str,
}
STATUS_FIELDS = frozenset([*STATUS_KINDS, "layout", "wanted", "account"])
"""A run of an earlier version has none of the last three."""
ACCOUNT_KINDS: Kinds = {
    **dict.fromkeys(("goodput", "idle"), float),
    **dict.fromkeys(("num_recoveries", "lost_steps"), int),
    "recoveries": list,
}
"""Of the account in status.json; its recoveries are the last ones."""
SCRIPT_KINDS: Kinds = {"level": int, "level_reason": str}
"""Of a script's run, in status and result; of an earlier version it has neither."""
SAMPLES_FIELDS = frozenset(["step", "first", "count", "sha256"])
RESULT_KINDS: Kinds = {
    "outcome": str,
    "steps": int,
    "loss": float | int | None,
    "weights_sha256": str,
    "generations": int,
    "lost_steps": int,
    "goodput": float | int | None,
    "badput": dict,
    "recoveries": list,
}
RESULT_FIELDS = frozenset(RESULT_KINDS)
PHASES_S = ("detect_s", "fence_s", "form_s", "state_s", "first_step_s", "total_s")
RECOVERY_KINDS: Kinds = {"cause": str, "lost_steps": int, **dict.fromkeys(PHASES_S, float)}

log = logging.getLogger(__name__)


class RunDirectory:
    """Owns a run's files. One writer at a time; opening it repairs what a crash left torn.

    Where storage cannot append, the files grow in a local spool and a thread brings them over.
    """

    RECORD, MOVED = "metrics.jsonl", ROLLED_BACK
    """Lines of the engine's steps, and those that were moved aside."""

    def __init__(
        self, storage: str | Folder, name: str, *, spool: Path | None = None, launch: str = ""
    ) -> None:
        """launch: whoever opens it again for the same launch of the run may do so at once. OSError
        leaves nothing of it, so that it may be tried again."""
        base = storage if isinstance(storage, Folder) else reach_folder(storage)
        self.folder = base.at(name)
        self.place = str(self.folder) if isinstance(storage, Folder) else place_of(storage, name)
        create(self.folder, self.place)
        with ExitStack() as undo:
            self._open_files(spool, launch, undo)
            undo.pop_all()
        if self._remote is not None:
            self._uploader.start()

    def _open_files(self, spool: Path | None, launch: str, undo: ExitStack) -> None:
        """undo: gets what must be done if this fails."""
        self._lock_file = lock(self.folder.local, self.place) if self.folder.local else None
        self._claim: Claim | None = None
        if self._lock_file is None:
            self._claim = Claim(self.folder, shown_uri(self.place), launch)
            self._claim.take()
            undo.callback(self._claim.release)
        else:
            undo.callback(self._lock_file.close)
        self._remote = None if self.folder.local else self.folder
        if self._remote is not None and spool is None:
            spool = Path(tempfile.mkdtemp(prefix="elastic-"))
            undo.callback(shutil.rmtree, spool, ignore_errors=True)
        directory = self.folder.local or spool
        assert directory is not None
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        self._status: dict[str, Any] | None = None  # what the uploader brings over next
        self._status_at = -REMOTE_STATUS_EVERY_S
        self._lock = threading.Lock()
        self.upload_error = ""
        """Why the last upload failed; empty after one that did not."""
        self._closed = threading.Event()
        self._journal = self._open("journal.jsonl")
        self._metrics = self._open(self.RECORD)
        self._samples = self._open("samples.jsonl")
        self._anatomy = self._open("anatomy.jsonl")
        has_rolled_back = self.folder.exists(self.MOVED) or segments(self.folder, self.MOVED)
        self._rolled_back = self._open(self.MOVED) if has_rolled_back else None
        self._owed: deque[Callable[[], object]] = deque()
        """What a disk did not take, in order: a roll back, and whatever came after it."""
        self.last_step = self._repair()
        """Committed steps on record."""
        self._written_step = self._uploaded_step = self.last_step
        self._uploader = threading.Thread(target=self._keep_uploading, daemon=True)

    @property
    def _files(self) -> tuple[LineFile | None, ...]:
        """In the order in which they are closed."""
        records = self._samples, self._metrics
        return (self._journal, self._anatomy, self._rolled_back, *records)

    @property
    def logs(self) -> Path:
        """Where worker logs go on this node; brought to remote storage at the end."""
        return self.directory / "logs"

    @property
    def safe_step(self) -> int:
        """Committed steps whose record outlives this process: no line of them waits for room."""
        return self._written_step if self._remote is None else self._uploaded_step

    @property
    def tensorboard(self) -> Path | None:
        """Where curves go; None where storage cannot append."""
        return self.directory / "tensorboard" if self.folder.local else None

    @property
    def taken_by(self) -> str:
        """The launch that writes this run now instead of us; empty as it should be."""
        return "" if self._claim is None else self._claim.taken_by

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()

    def begin(self, config: dict[str, Any]) -> None:
        """Write config.json; a run that is extended or resumed has no result any more. One that
        has not trained begins anew, perhaps with other data."""
        self.folder.delete("result.json")
        if not has_trained(self.folder):
            self.folder.delete("data.json")
        write_json(self.folder, "config.json", config)

    def write_status(self, status: dict[str, Any]) -> None:
        check_fields("status", {"account": None, **without(status, SCRIPT_KINDS)}, STATUS_FIELDS)
        if self._remote is None:
            write_json(self.folder, "status.json", status, is_durable=False)
        else:
            self._status = status

    def write_result(self, result: dict[str, Any]) -> None:
        check_fields("result", without(result, SCRIPT_KINDS), RESULT_FIELDS)
        self._check_claim()
        write_json(self.folder, "result.json", result)

    def append_journal(self, line: dict[str, Any]) -> None:
        self._journal.append(line)

    def append_anatomy(self, lines: list[dict[str, Any]]) -> None:
        """Measurements: nothing goes on from them, and a lost one costs nothing."""
        for line in lines:
            self._anatomy.keep(encode(line) + b"\n")
        self._anatomy.write()

    def append_logs(self, texts: dict[str, str]) -> None:
        """Add to files among the logs, by name."""
        for name, text in texts.items():
            with open_own(self.logs / name, "a") as file:
                file.write(text)

    def record_step(self, metrics: dict[str, Any], samples: dict[str, Any]) -> bool:
        """Put one committed step on record. False: it is there already, said twice."""
        check_fields("metrics", without(metrics, MORE_METRICS), METRICS_FIELDS)
        check_fields("samples", samples, SAMPLES_FIELDS)
        step: int = metrics["step"]
        assert samples["step"] == step, f"metrics of step {step}, samples of {samples['step']}"
        if step <= self.last_step:
            return False
        if step != self.last_step + 1:
            raise ValueError(
                f"step {step} cannot follow step {self.last_step} in {self._metrics.path}: "
                "a committed step was not reported"
            )
        self.last_step = step
        keep = partial(self._keep, encode(metrics) + b"\n", encode(samples) + b"\n")
        if self._owed:
            self._owed.append(keep)
        else:
            keep()
        self._write_out()
        return True

    def _keep(self, metrics: bytes, samples: bytes) -> None:
        self._metrics.keep(metrics)
        self._samples.keep(samples)

    def _write_out(self) -> None:
        """All that is owed and kept; OSError leaves the rest of it for the next line."""
        if self._owed:
            with self._lock:
                while self._owed:
                    self._owed[0]()
                    self._owed.popleft()
        self._write_lines()
        self._written_step = self.last_step

    def _write_lines(self) -> None:
        """Each file, whatever becomes of the other."""
        try:
            self._samples.write()
        finally:
            self._metrics.write()

    def roll_back(self, step: int) -> int:
        """Return to `step` committed steps: later metrics move aside. How many steps are lost.

        A crash in between leaves lines in both files; opening the run directory again ends it.
        Storage that is away gets it before anything that is newer.
        """
        lost = self.last_step - step
        if lost <= 0:
            return 0
        self.last_step = step
        self._written_step = min(self._written_step, step)
        self._uploaded_step = min(self._uploaded_step, step)
        self._owed += (
            self._write_lines,
            partial(self._keep_later, step),
            partial(self._drop_later, step),
        )
        try:
            self._write_out()
            with self._lock:
                self._check_claim()
                self._cut_storage()
        except OSError as error:
            place = shown_uri(self.place)
            log.warning('storage=%s step=%d reason="%s"', place, step, first_line(error))
        return lost

    def _keep_later(self, step: int) -> None:
        with self._metrics.path.open("rb") as file:
            file.seek(end_of_step(self._metrics.path, step))
            later = file.read()
        if self._rolled_back is None:
            self._rolled_back = LineFile(self.directory / self.MOVED, self._remote, is_new=True)
        self._rolled_back.keep(later)

    def _drop_later(self, step: int) -> None:
        assert self._rolled_back is not None
        self._rolled_back.sync()
        for lines in (self._metrics, self._samples):
            lines.truncate_here(end_of_step(lines.path, step))

    def _cut_storage(self) -> None:
        """Storage drops the lines that were given up, once it has them aside, and before it gets
        any that is newer: of samples nobody could tell which are which."""
        if self._rolled_back is not None:
            self._rolled_back.upload()
        for lines in (self._metrics, self._samples):
            lines.cut()

    def sync(self) -> None:
        """What is on record survives the crash of this machine."""
        self._check_claim()
        self._write_out()
        for lines in (self._metrics, self._samples):
            lines.sync()
        if self._remote is not None:
            self.flush(with_status=False)

    def skip_to(self, step: int) -> tuple[int, int] | None:
        """Go on from a state that is newer than the record, whose lines are lost with those who
        had them last. First and last of the missing steps, None if none is missing."""
        first, last = self.last_step + 1, step
        if first > last:
            return None
        log.warning(
            'step=%d reason="the lines of steps %d to %d are lost: the run goes on without them"',
            step,
            first,
            last,
        )
        self.last_step = self._written_step = step
        return first, last

    def flush(self, *, with_status: bool = True) -> None:
        """Bring over what is new; the uploader does it every few seconds."""
        with self._lock:
            self._check_claim()
            step = self._written_step
            self._cut_storage()
            for lines in (self._journal, self._anatomy, self._samples, self._metrics):
                lines.upload()
            self._uploaded_step = min(step, self.last_step)
        if with_status and self._status is not None:
            status, self._status = self._status, None
            write_json(self.folder, "status.json", status)
            self._status_at = time.monotonic()

    def undo(self, before: Before) -> None:
        """Close a run that came to nothing: all is put back before anybody else may open it."""
        self._end_uploads()
        self._check_claim()
        for lines in self._files:
            if lines is not None:
                lines.abandon()
        try:
            before.put_back()
        finally:
            if self._claim is not None:
                self._claim.withdraw(with_run=not before.exists)
            self._unlock()
        if self._lock_file is not None and not before.exists:
            before.remove_folder()

    def close(self) -> None:
        """Write everything out. The run directory cannot be used afterwards."""
        self._end_uploads()
        self._write_out()
        self.flush()
        for lines in self._files:
            if lines is not None:
                lines.close()
        if self._remote is not None:
            self._bring_logs(self._remote.at("logs"))
        self._unlock()
        if self._claim is not None:
            self._claim.release()

    def _end_uploads(self) -> None:
        self._closed.set()
        if self._uploader.is_alive():
            self._uploader.join(timeout=60)

    def _unlock(self) -> None:
        if self._lock_file is not None:
            (self.directory / LOCK).unlink(missing_ok=True)
            self._lock_file.close()

    def _open(self, name: str) -> LineFile:
        return LineFile(self.directory / name, self._remote)

    def _repair(self) -> int:
        """Finish an interrupted roll back, level metrics and samples; the last recorded step."""
        if self._rolled_back is not None:
            cut = end_without_moved(self._metrics.path, self._rolled_back.path)
            if cut < self._metrics.path.stat().st_size:
                self._metrics.truncate(cut)
        step = min(last_step(self._metrics.path), last_step(self._samples.path))
        for lines in (self._metrics, self._samples):
            if last_step(lines.path) > step:
                lines.truncate(end_of_step(lines.path, step))
        return step

    def _keep_uploading(self) -> None:
        while not self._closed.wait(UPLOAD_EVERY_S):
            is_due = time.monotonic() - self._status_at >= REMOTE_STATUS_EVERY_S
            try:
                self.flush(with_status=is_due)
                self.upload_error = ""
            except OSError as error:  # on_storage_error="warn": the next round tries again
                self.upload_error, place = first_line(error), shown_uri(self.place)
                log.warning('storage=%s upload failed, reason="%s"', place, self.upload_error)

    def _bring_logs(self, remote: Folder) -> None:
        remote.create()
        for path in sorted(self.logs.iterdir()):
            remote.write(path.name, path.read_bytes())


def has_trained(folder: Folder) -> bool:
    """Whether a run has left steps or checkpoints of its own: one of step 0 is imported."""
    names = folder.at("checkpoints").folders()
    sizes = [size for name, size in folder.sizes().items() if name.startswith(OF_STEPS)]
    return any(sizes) or any(name != folder_name(0) for name in names)


def create(folder: Folder, place: str) -> None:
    """WrongInput if it may not be, OSError if the storage is away."""
    try:
        folder.create()
    except OSError as error:
        if error.errno in AWAY if folder.local is not None else not is_refused(error):
            raise
        raise WrongInput(
            f"run directory {shown_uri(place)!r} cannot be created: {first_line(error)}; "
            "choose another storage or change its permissions"
        ) from error


def lock(directory: Path, place: str) -> IO[bytes] | None:
    """Only one process writes a run: the lock is gone with it. WrongInput if another holds it; None
    where the file system has no locks."""
    file = open_own(directory / LOCK, "wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in WITHOUT_LOCKS:
            return None
        raise WrongInput(
            f"{place} is being written by a live run; wait for it, or use another name"
        ) from error
    return file


def check_status(found: dict[str, Any], place: str) -> None:
    """WrongInput if it is not the content of a status.json."""
    check_kinds(found, STATUS_KINDS, place)
    check_level(found, place)
    if "account" in found:
        account = as_dict(found["account"])
        check_kinds(account, ACCOUNT_KINDS, f"the account in {place}")
        for recovery in account["recoveries"]:
            check_kinds(as_dict(recovery), RECOVERY_KINDS, place)
    for row in [*found["workers"], *found["standby"]]:
        worker = as_dict(row)
        own_s, rank = worker.get("own_s"), worker.get("rank")
        is_sound = isinstance(own_s, float | int | None) and isinstance(rank, int | None)
        is_sound = is_sound and isinstance(row, dict)
        if not is_sound or not str(worker.get("id")).isalnum():
            raise WrongInput(f"{place} is damaged: a worker in it is none")


def check_result(found: dict[str, Any], place: str) -> None:
    """WrongInput if it is not the content of a result.json."""
    check_kinds(found, RESULT_KINDS, place)
    check_level(found, place)
    for recovery in found["recoveries"]:
        check_kinds(as_dict(recovery), RECOVERY_KINDS, place)
    if without(found, SCRIPT_KINDS).keys() != RESULT_FIELDS:
        raise WrongInput(f"{place} is damaged: it has fields of no result")


def check_level(found: dict[str, Any], place: str) -> None:
    """WrongInput if a level is none."""
    if "level" in found:
        check_kinds(found, SCRIPT_KINDS, place)


def without(values: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """The fields that every run has."""
    return {name: value for name, value in values.items() if name not in names}


def as_dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def check_fields(name: str, values: dict[str, Any], fields: frozenset[str]) -> None:
    assert values.keys() == fields, f"{name}: fields differ by {sorted(values.keys() ^ fields)}"
