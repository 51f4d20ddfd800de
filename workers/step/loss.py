"""What `loss` may return. Folding losses over micro-batches and ranks is in vote.py."""

import math
from typing import Any

import torch

from elastic.protocol.errors import WrongInput


def check_loss(loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss as (scalar to differentiate, weight or None). Raises WrongInput.

    The value of a weight on a GPU is not looked at: that would wait for the device.
    """
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        found = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise WrongInput(
            f"loss() must return a scalar tensor (the mean over the micro-batch) or (sum, weight), "
            f"not {found}; reduce it, for example with .mean()"
        )
    if total.is_complex():
        raise WrongInput(
            f"loss() must return a real floating-point number, not {_named(total.dtype)}; take its "
            "real part or its .abs()"
        )
    if not total.requires_grad:
        raise WrongInput(
            "loss() returned a tensor without a gradient; compute it from the model's output"
        )
    return total.reshape(()), None if weight is None else _scalar(weight)


def check_weight(weight: float, of: str = "") -> float:
    """A weight is a count: a sum that is not finite skips the step, a weight never may. Raises
    WrongInput. of: which one, after a blank."""
    if not (math.isfinite(weight) and weight >= 0):
        raise WrongInput(
            f"loss()'s weight{of} is {weight:g}; it must be a finite number, 0 or more: how many "
            "samples or tokens the sum is over"
        )
    return weight


def _scalar(weight: Any) -> torch.Tensor:
    try:
        weight = torch.as_tensor(weight).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        found = type(weight).__name__
        raise WrongInput(f"loss()'s weight must be a number, not {found}") from error
    if weight.numel() != 1:
        raise WrongInput(f"loss()'s weight must be a scalar, not of shape {tuple(weight.shape)}")
    if weight.is_complex():
        raise WrongInput(f"loss()'s weight must be a real number, not {_named(weight.dtype)}")
    if weight.device.type == "cpu":
        check_weight(float(weight))
    return weight


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
