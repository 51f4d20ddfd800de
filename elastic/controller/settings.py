"""From a RunConfig to the limits of its decisions and to what its workers are told: every wait
derives from `detect_s`.

The settings are config.py's, what the limits do is elastic/control's.
"""

from typing import Any

from elastic.config import RunConfig
from elastic.control.state import Limits
from elastic.protocol.timeouts import timeouts_of
from elastic.protocol.worker_spec import Cpus, WorkerSpec

SAVE_EVERY_S = 600.0
"""What a fall back to the newest checkpoint may cost, about."""


def limits_of(config: RunConfig) -> Limits:
    timeouts = timeouts_of(config.detect_s)
    return Limits(
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        standby=config.standby,
        steps=config.steps,
        max_failures=config.max_failures,
        join_timeout_s=timeouts.join_s,
        end_timeout_s=timeouts.end_s,
        confirm_timeout_s=timeouts.confirm_s,
        cold_patience_s=timeouts.cold_s,
        can_save=has_checkpoints(config),
        save_every_s=SAVE_EVERY_S if has_checkpoints(config) else None,
        must_save=config.checkpointing.on_storage_error == "fail",
        parallel=config.parallel,
        is_whole=config.parallel.is_whole,
        has_copies=not config.parallel.is_whole and config.checkpointing.snapshot_every == 1,
    )


def has_checkpoints(config: RunConfig) -> bool:
    return config.storage is not None or config.checkpointing.checkpoint_every is not None


def worker_spec(
    config: RunConfig,
    order: dict[str, Any],
    worker: int,
    controller: tuple[str, int],
    place: str,
    has_formed: bool = False,
) -> WorkerSpec:
    """order: what the driver has submitted (elastic/driver/launch.py). place: the run directory.
    has_formed: others train already; a standby takes a lost one's place, this one the standby's."""
    return WorkerSpec(
        worker=worker,
        run_id=order["run_id"],
        token=order["token"],
        controller=controller,
        device=order["device"],
        cpus=Cpus(config.resources.cpus_per_worker, config.resources.numa_binding),
        folder=order["folder"],
        place=place,
        steps=config.steps,
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        parallel=config.parallel,
        reduction=config.reduction,
        precision=config.precision,
        activation_checkpointing=config.activation_checkpointing,
        offload=config.offload,
        clip_norm=config.clip_norm,
        seed=config.seed,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpointing.checkpoint_every,
        snapshot_every=config.checkpointing.snapshot_every,
        has_checkpoints=has_checkpoints(config),
        max_nonfinite=config.faults.max_nonfinite,
        verify_every=config.faults.verify_every,
        validate=config.faults.validate,
        detect_s=config.detect_s,
        timeouts=timeouts_of(config.detect_s),
        spot=config.resources.spot,
        is_newcomer=has_formed,
        is_standby=has_formed and config.standby > 0,
    )
