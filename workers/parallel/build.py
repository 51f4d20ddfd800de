"""The choice of a strategy by its name: nobody else asks for one."""

from collections.abc import Callable
from typing import Any

import torch

from elastic.protocol.errors import WrongInput
from elastic.protocol.named import function_named
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup, NoBackup
from workers.parallel.ddp import build_replicated
from workers.parallel.strategy import Strategy

_AXES = {True: "no data axis, or 'ddp'", False: "'fsdp' or another sharded one beside it"}


def build_strategy(
    workload: Any,
    spec: WorkerSpec,
    device: torch.device,
    open_backup: Callable[[], Backup] = NoBackup,
) -> Strategy:
    """The strategy of `spec`'s axes, or the one that it names, with the state at step 0.

    `spec.parallel.strategy` names a function with these parameters. open_backup: makes this
    worker's side of peer memory, if the strategy needs one. Raises WrongInput; the user's own
    exceptions pass through.
    """
    if spec.parallel.strategy:
        make: Callable[..., Strategy] = function_named(
            spec.parallel.strategy, f"parallel='{spec.parallel}' names no strategy"
        )
        made = make(workload, spec, device, open_backup)
        if made.is_whole != spec.parallel.is_whole:
            holds = "the whole state" if made.is_whole else "a part of the state"
            raise WrongInput(
                f"parallel='{spec.parallel}': with this strategy every rank holds {holds}, which "
                f"does not go with {spec.parallel.data!r}: name {_AXES[made.is_whole]}"
            )
        return made
    if spec.parallel.pp > 1:
        from workers.parallel.pipeline.strategy import build_staged

        return build_staged(workload, spec, device, open_backup(), spec.parallel.pp)
    if spec.parallel.is_whole:
        return build_replicated(workload, spec, device)
    # Imported here, as stages above: replicas need not pay for FSDP2.
    from workers.parallel.sharded import build_sharded

    keeps_parameters = spec.parallel.data == "fsdp-grad-op"
    return build_sharded(workload, spec, device, open_backup(), keeps_parameters=keeps_parameters)
