"""TensorBoard curves of a run, written step by step from the lines of metrics.jsonl.

tensorboardX is imported when the first `Curves` is made.
"""

import sys
from pathlib import Path
from typing import Any

CURVES = ("loss", "world_size", "generation", "step_s", "samples")
MAX_QUEUE = 10_000


class Curves:
    """The event file in a local folder; steps after `last_step` in older files are purged."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        self._writer: Any = import_without_torch().SummaryWriter(
            logdir=str(path),
            purge_step=last_step + 1 if path.exists() else None,
            flush_secs=5,
            max_queue=MAX_QUEUE,
        )
        # private: its thread ends at the first error (a full disk), and a full queue waits for ever
        self._thread: Any = self._writer.file_writer.event_writer._worker

    def record(self, metrics: dict[str, Any]) -> None:
        """Add one committed step; values that are not finite are left out."""
        step, at = metrics["step"], metrics["time"]
        values = {name: metrics[name] for name in CURVES}
        values |= {f"user/{name}": value for name, value in metrics["user"].items()}
        for name, value in values.items():
            if value is not None and self._thread.is_alive():
                self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        """Raises OSError; of curves that broke off before, nothing more is written."""
        if self._thread.is_alive():
            self._writer.close()


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
