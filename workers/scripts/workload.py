"""The workload of a script run: what the engine itself trains, votes on and copies to newcomers.

It is one number, which says whether the script has ended. A step of such a run is a published
report; the script's own model is none of the engine's business.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Progress(nn.Module):
    """The number: 0 until a step says that the script has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = nn.Parameter(torch.zeros(1))
        self.ends_now = False
        """Whether the step at hand is the last; all ranks say the same."""

    def forward(self) -> Tensor:
        return self.ended.sum() * (-1.0 if self.ends_now else 0.0)

    @property
    def has_ended(self) -> bool:
        return bool(self.ended.detach().numpy()[0] > 0)


class ScriptWorkload:
    """One micro-batch for each worker that the run may have."""

    loader_processes = 1

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def build_model(self) -> nn.Module:
        return Progress()

    def build_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    def dataset(self) -> range:
        return range(self.num_workers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model()
