"""TensorBoard curves of a run, written step by step from the lines of metrics.jsonl.

tensorboardX is imported when the first `Curves` is made.
"""

from pathlib import Path
from typing import Any

CURVES = ("loss", "world_size", "generation", "step_s", "samples")


class Curves:
    """The event file in a local folder; steps after `last_step` in older files are purged."""

    def __init__(self, path: Path, last_step: int = 0) -> None:
        # heavy, and only the controller's process needs it
        import tensorboardX  # pyright: ignore[reportMissingTypeStubs]

        self._writer: Any = tensorboardX.SummaryWriter(
            logdir=str(path), purge_step=last_step + 1 if path.exists() else None, flush_secs=5
        )

    def record(self, metrics: dict[str, Any]) -> None:
        """Add one committed step; values that are not finite are left out."""
        step, at = metrics["step"], metrics["time"]
        values = {name: metrics[name] for name in CURVES}
        values |= {f"user/{name}": value for name, value in metrics["user"].items()}
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        self._writer.close()
