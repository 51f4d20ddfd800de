"""The scalars of a step: what TensorBoard and trackers are told of its line in metrics.jsonl."""

import math
from collections.abc import Mapping
from typing import Any

from elastic.protocol.step_record import OF_OPTIMIZER

SCALARS = ("loss", *OF_OPTIMIZER, "step_s", "world_size", "generation", "samples")
RATE = "samples_per_s"


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """By name, without the user's own; finite numbers only."""
    found = {name: number(line.get(name)) for name in SCALARS}
    step, step_s = number(line.get("step")), found["step_s"]
    if step > 0 and step_s > 0:  # every step has the same number of samples
        found[RATE] = found["samples"] / step / step_s
    return {name: value for name, value in found.items() if math.isfinite(value)}


def number(value: object) -> float:
    """NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
