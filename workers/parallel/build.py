"""The choice of a strategy by its name: nobody else asks for one."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from elastic.protocol.errors import WrongInput
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup, NoBackup
from workers.parallel.ddp import build_replicated
from workers.parallel.strategy import Strategy


def build_strategy(
    workload: Any,
    spec: WorkerSpec,
    device: torch.device,
    open_backup: Callable[[], Backup] = NoBackup,
) -> Strategy:
    """The strategy of `spec`'s axes, or the one that it names, with the state at step 0.

    `spec.strategy` names a function with these parameters. open_backup: makes this worker's side of
    peer memory, if the strategy needs one. Raises WrongInput; the user's own exceptions pass
    through.
    """
    if spec.strategy:
        return _find(spec.strategy)(workload, spec, device, open_backup)
    if not spec.parallel.is_sharded:
        return build_replicated(workload, spec, device)
    # Imported here: replicas need not pay for FSDP2.
    from workers.parallel.sharded import build_sharded

    keeps_parameters = spec.parallel.data == "fsdp-grad-op"
    return build_sharded(workload, spec, device, open_backup(), keeps_parameters=keeps_parameters)


def _find(strategy: str) -> Callable[..., Strategy]:
    module, _, name = strategy.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise WrongInput(f"strategy={strategy!r} names no strategy: {error}") from error
