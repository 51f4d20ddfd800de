"""`ScriptDirectory`: the run directory of a script's run.

Its metrics.jsonl has the steps of the script's optimizers. The engine's own steps are its reports
with a checkpoint, whose lines are in commits.jsonl; all else is as run_directory.py has it. Runs of
earlier versions have those in metrics.jsonl; opening one brings it to the same shape.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from elastic.protocol.step_record import AppliedRecord, StepMetrics
from elastic.store.applied_steps import AppliedSteps
from elastic.store.files import Folder, sync_directory
from elastic.store.journal import LineFile, joined, numbered
from elastic.store.run_directory import RunDirectory


class ScriptDirectory(RunDirectory):
    """Whoever writes it."""

    RECORD, MOVED = "commits.jsonl", "commits.rolledback.jsonl"

    def _open_files(self, spool: Path | None, launch: str, undo: ExitStack) -> None:
        super()._open_files(spool, launch, undo)
        self._applied = AppliedSteps(self.directory, self._remote, self._lock)

    def _open(self, name: str) -> LineFile:
        if name == self.RECORD and has_earlier_shape(self.folder, self.RECORD):
            for earlier, own in (
                (RunDirectory.MOVED, self.MOVED),
                (RunDirectory.RECORD, self.RECORD),  # the last one, by which it is known
            ):
                rename(self.directory, self._remote, earlier, own)
        return super()._open(name)

    @property
    def _files(self) -> tuple[LineFile | None, ...]:
        return (*super()._files, *self._applied.files)

    def record_applied(
        self, call: int, base: int, steps: Sequence[StepMetrics]
    ) -> list[StepMetrics]:
        """As `AppliedSteps.record`."""
        return self._applied.record(call, base, steps)

    @property
    def safe_applied(self) -> AppliedRecord:
        """How far the record goes that outlives this process."""
        return self._applied.safe

    def flush(self, *, with_status: bool = True) -> None:
        super().flush(with_status=with_status)
        with self._lock:
            self._applied.upload()


def has_earlier_shape(folder: Folder, record: str) -> bool:
    """There are steps of the engine's, and no file of theirs."""
    sizes = folder.sizes()
    if record in sizes or numbered(sizes, record):
        return False
    samples = "samples.jsonl"
    return any(sizes[name] for name in (samples, *numbered(sizes, samples)) if name in sizes)


def rename(directory: Path, remote: Folder | None, name: str, new_name: str) -> None:
    """A file of lines, here and in storage that cannot append, if it is there."""
    if (directory / name).exists():
        (directory / name).rename(directory / new_name)
        sync_directory(directory)
    if remote is None:
        return
    names = remote.names()
    found = [each for each in (name, *numbered(names, name)) if each in names]
    if found:
        remote.write(new_name, joined(remote, name))
    for each in found:
        remote.delete(each)
