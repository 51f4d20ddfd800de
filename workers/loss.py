"""What `loss` may return. Folding losses over micro-batches and ranks is in vote.py."""

from typing import Any

import torch

from elastic.protocol.errors import WrongInput


def check_loss(loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss as (scalar to differentiate, weight or None). Raises WrongInput."""
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or total.is_complex():
        found = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise WrongInput(
            f"loss() must return a scalar tensor (the mean over the micro-batch) or (sum, weight), "
            f"not {found}; reduce it, for example with .mean()"
        )
    if not total.requires_grad:
        raise WrongInput(
            "loss() returned a tensor without a gradient; compute it from the model's output"
        )
    if weight is not None:
        weight = torch.as_tensor(weight).detach()
        if weight.numel() != 1:
            raise WrongInput(
                f"loss()'s weight must be a scalar, not of shape {tuple(weight.shape)}"
            )
    return total.reshape(()), weight
