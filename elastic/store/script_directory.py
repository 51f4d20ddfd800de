"""`ScriptDirectory`: the run directory of a script's run.

Its metrics.jsonl has the steps of the script's optimizers. The engine's own steps are its reports
with a checkpoint, whose lines are in commits.jsonl; all else is as run_directory.py has it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from elastic.protocol.step_record import StepMetrics
from elastic.store.applied_steps import AppliedSteps
from elastic.store.journal import LineFile
from elastic.store.run_directory import RunDirectory


class ScriptDirectory(RunDirectory):
    """Whoever writes it."""

    RECORD, MOVED = "commits.jsonl", "commits.rolledback.jsonl"

    def _open_files(self, spool: Path | None, launch: str, undo: ExitStack) -> None:
        super()._open_files(spool, launch, undo)
        self._applied = AppliedSteps(self.directory, self._remote, self._lock)

    @property
    def _files(self) -> tuple[LineFile | None, ...]:
        return (*super()._files, *self._applied.files)

    def record_applied(
        self, call: int, base: int, steps: Sequence[StepMetrics]
    ) -> list[StepMetrics]:
        """As `AppliedSteps.record`."""
        return self._applied.record(call, base, steps)

    def flush(self, *, with_status: bool = True) -> None:
        super().flush(with_status=with_status)
        with self._lock:
            self._applied.upload()
