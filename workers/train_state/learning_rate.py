"""What an optimizer steps with."""

from math import isfinite

import torch


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Of its first group of parameters; None if it has none that the host knows."""
    found = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.device.type == "cpu":
        found = float(found)
    return float(found) if isinstance(found, int | float) and isfinite(found) else None
