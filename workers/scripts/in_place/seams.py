"""What of torch's classes is replaced while a script runs that commits in place. Nothing else of
ours reaches into them for that; all of it is put back at the end of the call.

Some of it is private to torch: other versions than the tested ones, and a torch on which the trial
(trial.py) finds another gradient than stock DDP's, run at level 0.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from workers.scripts.in_place import rule
from workers.scripts.in_place.course import Course
from workers.scripts.in_place.ddp import Backward, Replica, replica_of
from workers.scripts.in_place.loader import Loaders
from workers.scripts.in_place.rule import Obstacle
from workers.torch_private import c10d as private
from workers.torch_private.autograd import at_end_of_backward

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
SHARED_OPTIMIZERS = "torch.distributed.optim."
"""By the names of their modules, which take long to import."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def standing_in(course: Course, loaders: Loaders) -> Iterator[None]:
    """Within, models, samplers and loaders are this call's."""
    with ExitStack() as stack:
        seams = (*of_models(course), *of_loaders(course, loaders), *of_others(course))
        for owner, name, value in seams:
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(hearing_of_parameters(course))
        stack.callback(register_optimizer_step_post_hook(hearing_of_steps(course)).remove)
        yield


Seam = tuple[Any, str, Any]
uncompiled: Any = torch.compiler.disable


def of_models(course: Course) -> list[Seam]:
    ddp: Any = DistributedDataParallel
    torchs_init, torchs_forward = ddp.__dict__[private.MAKES_REDUCER], ddp.forward
    backward = Backward(at_end_of_backward)

    def make_reducer(
        module: Any, parameters: Any, expect_sparse: Any, names: Any, is_static: Any
    ) -> None:
        if obstacle := obstacle_of(module, expect_sparse):
            course.refuse(obstacle.why)
            torchs_init(module, parameters, expect_sparse, names, is_static)
        else:
            module.logger = None
            module.reducer = Replica(
                module, parameters, course, backward, is_static=bool(is_static)
            )

    def forward(module: Any, *inputs: Any, **named: Any) -> Any:
        replica = replica_of(module)
        if replica is None:
            return torchs_forward(module, *inputs, **named)
        before_forward(replica)
        if module.device_ids:
            device = torch.device(module.device_type, module.device_ids[0])
            is_aside = module.use_side_stream_for_tensor_copies
            moved, moved_named = private.move_arguments(inputs, named, device, is_aside)
            inputs, named = moved[0], moved_named[0]
        output = module.module(*inputs, **named)
        if torch.is_grad_enabled():
            after_forward(replica, output, module.require_backward_grad_sync)
        return output

    def set_static_graph(module: Any) -> None:
        module.static_graph = True

    return [
        (ddp, private.MAKES_REDUCER, make_reducer),
        (ddp, "forward", forward),
        (ddp, private.SETS_STATIC_GRAPH, set_static_graph),
        (ddp, "register_comm_hook", denied(course, "register_comm_hook")),
        (ddp, private.HOOKS_BUFFERS, denied(course, private.HOOKS_BUFFERS)),
        (ddp, "join", denied(course, "join")),
    ]


def before_forward(replica: Replica) -> None:
    """What keeps a compiler out takes as long as all the rest: eager code does without."""
    if torch.compiler.is_dynamo_compiling():
        before_compiled(replica)
    else:
        replica.before_forward()


def after_forward(replica: Replica, output: Any, is_synchronised: bool) -> None:
    if torch.compiler.is_dynamo_compiling():
        after_compiled(replica, output, is_synchronised)
    else:
        replica.after_forward(output, is_synchronised=is_synchronised)


@uncompiled
def before_compiled(replica: Replica) -> None:
    replica.before_forward()


@uncompiled
def after_compiled(replica: Replica, output: Any, is_synchronised: bool) -> None:
    replica.after_forward(output, is_synchronised=is_synchronised)


def denied(course: Course, name: str) -> Callable[..., Any]:
    """What only torch's own reducer can do."""
    torchs_own = DistributedDataParallel.__dict__[name]

    def call(module: Any, *args: Any, **named: Any) -> Any:
        if replica_of(module) is not None:
            course.deny(rule.OWN_REDUCTION.of(name))
        return torchs_own(module, *args, **named)

    return call


def obstacle_of(module: Any, expect_sparse: Any) -> Obstacle | None:
    """Why this model's gradients are left to torch's own reducer; None: they are ours."""
    checks = (
        (module.process_group is not torch.distributed.group.WORLD, rule.OWN_GROUP),
        (module.mixed_precision is not None, rule.MIXED_PRECISION),
        (any(expect_sparse), rule.SPARSE),
        (module.is_multi_device_module, rule.SEVERAL_DEVICES),
        (private.delays_reduction(module), rule.DELAYED),
    )
    return next((obstacle for is_so, obstacle in checks if is_so), None)


def of_loaders(course: Course, loaders: Loaders) -> list[Seam]:
    sampler, batch_sampler, loader = DistributedSampler, BatchSampler, DataLoader
    torchs_init, torchs_batches = sampler.__init__, batch_sampler.__iter__
    torchs_iterate: Any = loader.__iter__

    def make_sampler(
        self: Any,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **named: Any,
    ) -> None:
        """The ranks are those of the call: a pass keeps its number of iterations."""
        replicas = course.num_ranks if num_replicas is None else num_replicas
        own = course.group.rank() if rank is None else rank
        torchs_init(self, dataset, replicas, own, *args, **named)

    def batches(self: Any) -> Iterator[list[int]]:
        found = loaders.indices_of(self)
        return torchs_batches(self) if found is None else found

    def iterate(self: Any) -> Iterator[Any]:
        return loaders.iterate(self, torchs_iterate)

    return [
        (sampler, "__init__", make_sampler),
        (batch_sampler, "__iter__", batches),
        (loader, "__iter__", iterate),
    ]


def of_others(course: Course) -> list[Seam]:
    """What the script may use, but not in place."""
    torchs_init = Optimizer.__init__

    @wraps(torchs_init)
    def make_optimizer(self: Any, *args: Any, **named: Any) -> None:
        if type(self).__module__.startswith(SHARED_OPTIMIZERS):
            course.refuse(rule.SHARED_OPTIMIZER.of(type(self).__name__))
        torchs_init(self, *args, **named)

    return [
        (LBFGS, "step", refused(course, LBFGS, "step", rule.LBFGS)),
        (Optimizer, "__init__", make_optimizer),
        (DeviceMesh, "__init__", refused(course, DeviceMesh, "__init__", rule.DEVICE_MESH)),
    ]


def refused(course: Course, owner: Any, name: str, obstacle: Obstacle) -> Callable[..., Any]:
    torchs_own = owner.__dict__[name]

    def call(self: Any, *args: Any, **named: Any) -> Any:
        course.refuse(obstacle.why)
        return torchs_own(self, *args, **named)

    return call


def hearing_of_steps(course: Course) -> Callable[..., None]:
    """A hook of all optimizers."""
    hear_compiled = uncompiled(course.hear_step)

    def hear(optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            hear_compiled(optimizer)
        else:
            course.hear_step(optimizer)

    return hear


@contextmanager
def hearing_of_parameters(course: Course) -> Iterator[None]:
    """Within, a module that gets a parameter or a module is heard of: it may be of a model."""

    def hear(module: Any, *_: Any) -> None:
        course.training.has_new_parameters = True
        if type(module).__module__.startswith(FSDP1):
            course.refuse(rule.FSDP1.why)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(hear).remove)
        stack.callback(register_module_module_registration_hook(hear).remove)
        yield
