"""From a workload to a replica: model, optimizer and scheduler, built under the run's seed."""

import inspect
from typing import Any, Protocol

import torch
from torch import nn

from elastic.protocol.errors import WrongInput
from workers.randomness import seed_microbatch
from workers.replica import Replica

BUILD_STEP = -1
"""Stands for "before the first step" where randomness is seeded by step."""


class Settings(Protocol):
    """What building needs of a WorkerSpec, or of an import."""

    @property
    def seed(self) -> int: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def max_nonfinite(self) -> int: ...


def build_replica(workload: Any, spec: Settings, device: torch.device) -> Replica:
    """The state at step 0. Raises WrongInput; the user's own exceptions pass through."""
    if hasattr(workload, "init_weights"):
        raise WrongInput("init_weights() is not available yet; initialise in build_model()")
    seed_microbatch(spec.seed, BUILD_STEP, 0)
    model = workload.build_model()
    if not isinstance(model, nn.Module):
        raise WrongInput(f"build_model() must return a torch nn.Module, not {type(model).__name__}")
    model = model.to(device)
    parameters = [p for _, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise WrongInput("build_model() returned a model without trainable parameters")
    seed_microbatch(spec.seed, BUILD_STEP, 1)
    optimizer = _build_optimizer(workload, parameters, model)
    scheduler = _build_scheduler(workload, optimizer)
    return Replica(
        model,
        parameters,
        optimizer,
        scheduler,
        clip_norm=spec.clip_norm,
        max_nonfinite=spec.max_nonfinite,
    )


def _build_optimizer(
    workload: Any, parameters: list[nn.Parameter], model: nn.Module
) -> torch.optim.Optimizer:
    takes_model = len(inspect.signature(workload.build_optimizer).parameters) >= 2
    arguments = (parameters, model) if takes_model else (parameters,)
    optimizer = workload.build_optimizer(*arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WrongInput(
            f"build_optimizer() must return a torch optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise WrongInput("LBFGS evaluates the loss several times in a step; use another optimizer")
    known = {id(p) for p in parameters}
    strangers = sum(id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if strangers:
        raise WrongInput(
            f"build_optimizer() uses {strangers} parameters that are not trainable parameters of "
            "the model; take them from `params` or from `model`"
        )
    return optimizer


def _build_scheduler(workload: Any, optimizer: torch.optim.Optimizer) -> Any | None:
    if not hasattr(workload, "build_scheduler"):
        return None
    scheduler = workload.build_scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise WrongInput(
            "ReduceLROnPlateau depends on a metric, not on committed steps; use a scheduler "
            "whose step() takes no argument"
        )
    return scheduler
