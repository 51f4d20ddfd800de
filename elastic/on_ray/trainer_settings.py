# Ray is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What becomes of each setting of a TorchTrainer: it has its meaning, is refused, or is told to
have no effect.

The run that the others make is elastic/ray_train.py's.
"""

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

from ray.train import UserCallback

BACKENDS = (None, "gloo", "nccl")
SUPPORTED, REFUSED, RAYS = "supported", "refused", "Ray itself refuses it"


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A setting that may be given, and that nothing follows from."""

    default: object
    """Ray's own, which is not told."""
    why: str
    """What elastic does instead."""


Meaning: TypeAlias = str | NoEffect
FIELDS: dict[str, dict[str, Meaning]] = {
    "TorchTrainer": {
        "train_loop_per_worker": SUPPORTED,
        "train_loop_config": SUPPORTED,
        "torch_config": SUPPORTED,
        "scaling_config": SUPPORTED,
        "run_config": SUPPORTED,
        "datasets": SUPPORTED,
        "dataset_config": SUPPORTED,
        "validation_config": REFUSED,
        "metadata": RAYS,
        "resume_from_checkpoint": RAYS,
    },
    "ScalingConfig": {
        "num_workers": SUPPORTED,
        "use_gpu": SUPPORTED,
        "resources_per_worker": SUPPORTED,
        "accelerator_type": SUPPORTED,
        "label_selector": SUPPORTED,
        "placement_strategy": NoEffect("PACK", "workers are placed one by one, as Ray has room"),
        "elastic_resize_monitor_interval_s": NoEffect(
            60.0, "a worker enters at the next report with a checkpoint, once it is ready"
        ),
        "use_tpu": REFUSED,
        "topology": REFUSED,
        "trainer_resources": RAYS,
    },
    "RunConfig": {
        "name": SUPPORTED,
        "storage_path": SUPPORTED,
        "failure_config": SUPPORTED,
        "checkpoint_config": SUPPORTED,
        "callbacks": SUPPORTED,
        "logging_config": SUPPORTED,
        "storage_filesystem": REFUSED,
        "worker_runtime_env": REFUSED,
        "sync_config": RAYS,
        "verbose": RAYS,
        "stop": RAYS,
        "progress_reporter": RAYS,
        "log_to_file": RAYS,
    },
    "FailureConfig": {
        "max_failures": SUPPORTED,
        "controller_failure_limit": NoEffect(-1, "a lost controller has a successor each time"),
        "max_preemption_failures": NoEffect(-1, "a worker that leaves does not count"),
        "relax_collectives_on_preemption": NoEffect(False, "nobody waits for a lost rank"),
        "preemption_grace_s": NoEffect(0.0, "the other workers stay, and go on at once"),
        "fail_fast": RAYS,
    },
    "CheckpointConfig": {
        "num_to_keep": SUPPORTED,
        "checkpoint_score_attribute": SUPPORTED,
        "checkpoint_score_order": SUPPORTED,
        "checkpoint_frequency": RAYS,
        "checkpoint_at_end": RAYS,
    },
    "LoggingConfig": {
        "log_level": NoEffect("INFO", "Ray Train's own processes, whose logs it is for, do not run")
    },
    "TorchConfig": {
        "backend": SUPPORTED,
        "init_method": NoEffect("env", "workers find each other by elastic's controller"),
        "timeout_s": NoEffect(1800, "a lost worker is noticed in 3 s at most"),
    },
    "DataConfig": {
        "datasets_to_split": SUPPORTED,
        "execution_options": SUPPORTED,
        "enable_shard_locality": NoEffect(True, "each node fetches each block once"),
    },
}
"""By class, in Ray's words; all that there are."""
OF_RAY_TRAIN = "RAY_TRAIN_"
HAS_EFFECT = "RAY_TRAIN_V2_ENABLED"


def refusal(trainer: Any) -> str | None:
    """The first thing that is asked for and not supported, and what to do instead."""
    return next((why for is_asked, why in refusals(trainer) if is_asked), None)


def refusals(trainer: Any) -> list[tuple[bool, str]]:
    """Whether it is asked for, and what to do instead."""
    scaling, run, torch = trainer.scaling_config, trainer.run_config, trainer.backend_config
    resources = scaling.resources_per_worker or {}
    sizes = sorted({"memory", "object_store_memory"} & set(resources))
    selectors = scaling.label_selector
    gpus = resources.get("GPU", int(scaling.use_gpu))
    placement = scaling.placement_strategy
    return [
        (
            type(torch).__name__ == "TorchftConfig",
            "leave TorchftConfig out: recovery is elastic's own",
        ),
        (
            torch.backend not in BACKENDS,
            f"torch_config backend {torch.backend!r} is not supported: gloo, nccl or None",
        ),
        (
            trainer.validation_config is not None,
            "validation_config= is not supported: validate in the training function",
        ),
        (bool(scaling.use_tpu), "TPUs are not supported"),
        (scaling.topology is not None, "TPUs are not supported: leave topology out"),
        (gpus not in (0, 1), f"one GPU per worker, resources_per_worker asks for {gpus}"),
        (
            bool(sizes),
            f"resources_per_worker {sizes[:1]} is not supported: workers are placed by CPUs, GPUs "
            "and further resources, not by memory",
        ),
        (
            placement.startswith("STRICT"),
            f"placement_strategy {placement} is not supported: no placement group can be resized",
        ),
        (
            isinstance(selectors, list) and any(each != selectors[0] for each in selectors),
            "label_selector must be the same for all workers: any of them may take another's place",
        ),
        (
            run.storage_filesystem is not None,
            "storage_filesystem is not supported yet: write storage_path as a URI",
        ),
        (
            any(not isinstance(callback, UserCallback) for callback in run.callbacks or ()),
            "RunConfig callbacks other than UserCallbacks talk to Ray Train's controller, which "
            "does not run here: leave them out",
        ),
        (
            bool(run.worker_runtime_env),
            "worker_runtime_env is not supported yet: give ray.init() a runtime_env",
        ),
    ]


def notes(trainer: Any) -> list[str]:
    """What is asked for and has no effect, a line each."""
    run = trainer.run_config
    asked = {
        "ScalingConfig": trainer.scaling_config,
        "FailureConfig": run.failure_config,
        "LoggingConfig": run.logging_config,
        "TorchConfig": trainer.backend_config,
        "DataConfig": trainer.data_config,
    }
    found = [
        f"{kind} {name} has no effect: {meaning.why}"
        for kind, settings in asked.items()
        for name, meaning in FIELDS[kind].items()
        if isinstance(meaning, NoEffect) and value_of(settings, name) != meaning.default
    ]
    variables = sorted(v for v in os.environ if v.startswith(OF_RAY_TRAIN) and v != HAS_EFFECT)
    if variables:
        found.append(f"{', '.join(variables)} in the environment: no effect under elastic")
    return found


def value_of(settings: Any, name: str) -> Any:
    """DataConfig keeps what it is given under other names."""
    return getattr(settings, name) if hasattr(settings, name) else getattr(settings, f"_{name}")
