"""From a workload to a state: model, optimizer and scheduler, built under the run's seed.

What a strategy makes of the model in between is workers/parallel's.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from elastic.protocol.errors import WrongInput
from elastic.protocol.mesh import Parallel
from elastic.protocol.worker_spec import WorkerSpec
from workers.step.activation_checkpointing import recompute
from workers.step.precision import DTYPES, Casting, LossScale, cast_inputs
from workers.step.randomness import seed_microbatch
from workers.tensors.strides import is_dense
from workers.train_state.blocks import blocks_of
from workers.train_state.train_state import TrainState

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
    @property
    def parallel(self) -> Parallel: ...
    @property
    def reduction(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def activation_checkpointing(self) -> bool: ...
    @property
    def offload(self) -> bool: ...


def build_state(model: nn.Module, workload: Any, spec: Settings, casting: Casting) -> TrainState:
    """The state at step 0, of a model that is wrapped as the strategy wants it."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise WrongInput("build_model() returned a model without trainable parameters")
    optimizer = build_optimizer(workload, spec, list(parameters.values()), model)
    scheduler = _build_scheduler(workload, optimizer)
    train_state = TrainState(
        model,
        parameters,
        optimizer,
        scheduler,
        clip_norm=spec.clip_norm,
        max_nonfinite=spec.max_nonfinite,
        casting=casting,
        loss_scale=LossScale() if spec.precision == "fp16" else None,
    )
    if spec.activation_checkpointing:
        recompute(blocks_of(model), train_state.buffers.is_tracked)
    return train_state


def check_threads(spec: WorkerSpec, device: torch.device) -> None:
    """After the workload's code: bits of the CPU's kernels follow the number of threads, which is
    to be the recorded one on every node."""
    found = torch.get_num_threads()
    if spec.reduction == "bitwise" and device.type == "cpu" and found != spec.cpus.num_threads:
        raise WrongInput(
            f"the workload set {found} intra-op threads, but reduction='bitwise' computes with "
            f"cpus_per_worker={spec.cpus.num_threads}: leave out torch.set_num_threads, or start "
            f"the run with cpus_per_worker={found}"
        )


def _check_strides(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not is_dense(parameter):
            raise WrongInput(
                f"parameter {name!r} of shape {list(parameter.shape)} has strides "
                f"{parameter.stride()}, so that elements share memory or lie apart; build it as "
                "nn.Parameter(tensor.contiguous())"
            )


def equip_blocks(model: nn.Module, spec: Settings, is_cast: Callable[[], bool]) -> None:
    """Before the model is wrapped. is_cast: whether its parameters are, when a forward asks."""
    blocks, dtype = blocks_of(model), DTYPES[spec.precision]
    if spec.activation_checkpointing and not blocks:
        raise WrongInput(
            "activation_checkpointing recomputes the members of nn.ModuleList and nn.Sequential, "
            "but the model has none with parameters of its own; leave it out"
        )
    if dtype is not None:
        cast_inputs(model, blocks, dtype, is_cast)


def build_model(workload: Any, spec: Settings) -> nn.Module:
    """On the CPU with its weights, or on the meta device if the workload has `init_weights`."""
    seed_microbatch(spec.seed, BUILD_STEP, 0)
    with torch.device("meta") if hasattr(workload, "init_weights") else nullcontext():
        model = workload.build_model()
    if not isinstance(model, nn.Module):
        raise WrongInput(f"build_model() must return a torch nn.Module, not {type(model).__name__}")
    _check_strides(model)
    return model


def build_optimizer(
    workload: Any, spec: Settings, parameters: list[nn.Parameter], model: nn.Module
) -> torch.optim.Optimizer:
    seed_microbatch(spec.seed, BUILD_STEP, 1)
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
