# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`Meters`: a run's numbers in Ray's own metrics, from where Prometheus reads them.

What is put on record is elastic/controller's; a dashboard is cluster_configs/grafana.json.
"""

import logging
import math
from collections.abc import Mapping

from ray.util.metrics import Gauge

METERS = {
    "step": "Committed steps.",
    "steps": "Steps that the run is to have.",
    "loss": "Of the last committed step.",
    "learning_rate": "Of the first group of parameters, in the last committed step.",
    "gradient_norm": "Before clipping, of the last committed step.",
    "step_seconds": "Of the last committed step.",
    "samples": "Samples of the committed steps.",
    "world_size": "Workers that train now.",
    "wanted_workers": "Workers that the run is to have at most.",
    "generation": "The membership that trains now.",
    "recoveries": "Losses that the run has recovered from since it was last started.",
    "lost_steps": "Committed steps that had to be done again.",
    "last_recovery_seconds": "How long the last recovery took.",
    "goodput": "Part of the wall time spent on steps that stayed committed.",
    "idle": "Part of the wall time that members waited for each other in steps.",
    "checkpoint_step": "The newest checkpoint's.",
}
"""By name, which Ray begins with `ray_elastic_`; each has tags: `run`, its name, and `run_id`."""

log = logging.getLogger(__name__)


class Meters:
    """Of one run, in its controller's process."""

    def __init__(self, run: str, run_id: str) -> None:
        self._gauges = {
            name: Gauge(f"elastic_{name}", description=about, tag_keys=("run", "run_id"))
            for name, about in METERS.items()
        }
        self.tags = {"run": run, "run_id": run_id}
        self._trouble = ""

    def show(self, values: Mapping[str, float | int | None]) -> None:
        """What is not known, or not finite, stays as it was. Nothing that fails here may end the
        run's status, which is told from the same task."""
        try:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    self._gauges[name].set(value, tags=self.tags)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.warning('meters reason="Ray takes no metrics: %s"', trouble)
            self._trouble = trouble
