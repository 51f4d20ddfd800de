"""TensorBoard curves of a run, written step by step from the lines of metrics.jsonl.

tensorboardX is imported when the first `Curves` is made. Its SummaryWriter takes each value through
a queue between processes and two threads, which cost more than all else that a step's record does.
"""

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.observe.anatomy import Shares
from elastic.observe.scalars import scalars_of

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0


class Curves:
    """The event file in a local folder; steps after `last_step` in older files are purged. A folder
    that takes no more, as on a full disk, ends the curves, and nothing else."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        is_later = path.exists()
        tensorboard = import_without_torch()
        self._proto, self._scalar = tensorboard.proto, tensorboard.summary.scalar
        self._flushed_at = time.monotonic()
        self._file: Any = None
        """None once the curves have broken off."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = tensorboard.event_file_writer.EventsWriter(str(path / "events"))
        except OSError as error:
            self._break_off(error)
        if is_later:
            session = self._proto.event_pb2.SessionLog
            start = session(status=session.START)
            self._write(time.time(), last_step + 1, session_log=start)

    def record(self, metrics: dict[str, Any]) -> None:
        """Add one committed step; values that are not finite are left out."""
        values: dict[str, float | None] = {**scalars_of(metrics)}
        values |= {f"user/{name}": value for name, value in metrics["user"].items()}
        self._write(metrics["time"], metrics["step"], summary=self._summary(values))
        self.flush_now_and_then()

    def record_shares(self, found: Shares) -> None:
        """Where the time of some steps went, and peak memory."""
        values = {f"anatomy/{part}": share for part, share in found.shares.items()}
        peaks = {f"memory/{name}_gib": size / 2**30 for name, size in found.peaks_bytes.items()}
        self._write(found.time, found.step, summary=self._summary({**values, **peaks}))

    def flush_now_and_then(self) -> None:
        """To be called while steps are slow, too: whoever looks sees those of seconds ago."""
        now = time.monotonic()
        if self._file is not None and now - self._flushed_at > FLUSH_EVERY_S:
            self._flushed_at = now
            try:
                self._file.flush()
            except OSError as error:
                self._break_off(error)

    def close(self) -> None:
        """Raises OSError; of curves that broke off before, nothing more is written."""
        if self._file is not None:
            self._file.close()

    def _summary(self, values: Mapping[str, float | None]) -> Any:
        summary = self._proto.summary_pb2.Summary()
        for name, value in values.items():
            if value is not None:
                summary.MergeFrom(self._scalar(name, value))
        return summary

    def _write(self, at: float, step: int, **what: Any) -> None:
        if self._file is not None:
            try:
                self._file.write_event(self._proto.event_pb2.Event(wall_time=at, step=step, **what))
            except OSError as error:
                self._break_off(error)

    def _break_off(self, error: OSError) -> None:
        log.warning('curves reason="%s"', error)
        self._file = None


def import_without_torch() -> Any:
    """tensorboardX, which would load torch if it could: 2 s of a core for scalars."""
    is_absent = "torch" not in sys.modules
    if is_absent:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        import tensorboardX  # pyright: ignore[reportMissingTypeStubs]
    finally:
        if is_absent:
            del sys.modules["torch"]
    return tensorboardX
