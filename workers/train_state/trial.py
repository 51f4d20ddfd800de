"""Before step 1: whether what the workload's objects keep can be carried to another process.

A step of an optimizer of its own kind is tried, and nothing of it stays. What can be carried is
state.py's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elastic.protocol.errors import WrongInput
from workers.tensors.local import local
from workers.train_state import serialization
from workers.train_state.build import Settings, build_optimizer
from workers.train_state.train_state import TrainState


def check_kept(train_state: TrainState) -> None:
    """WrongInput if what model, optimizer and scheduler keep from the beginning would be refused in
    a checkpoint, or by the first newcomer."""
    serialization.capture(train_state.model, train_state.optimizer, train_state.scheduler)


def try_optimizer(workload: Any, spec: Settings, train_state: TrainState) -> None:
    """WrongInput if state that the optimizer makes in a step would be refused likewise. The
    gradients of a micro-batch are there; whatever the step raises passes through. torch's own
    optimizers keep tensors only."""
    if type(train_state.optimizer).__module__.startswith("torch.optim."):
        return
    parameters = list(train_state.parameters.values())
    optimizer = build_optimizer(workload, spec, parameters, train_state.model)
    step_undone(optimizer, parameters)
    try:
        serialization.check_optimizer(train_state.model, optimizer)
    except WrongInput as error:
        kind = type(train_state.optimizer).__name__
        raise WrongInput(f"the state of optimizer {kind} cannot be kept: {error}") from error


def step_undone(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """A step after which the parameters are as before, and only the optimizer's own state is not.
    What it raises passes through."""
    kept = [local(p).detach().to("cpu", copy=True) for p in parameters]
    try:
        optimizer.step()
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                local(parameter).copy_(values)
