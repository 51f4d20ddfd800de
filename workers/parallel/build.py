"""The choice of a strategy by its name: nobody else asks for one."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from elastic.protocol.errors import WrongInput
from elastic.protocol.worker_spec import WorkerSpec
from workers.backup.backup import Backup, NoBackup
from workers.parallel.ddp import build_replicated
from workers.parallel.strategy import Strategy

ELSEWHERE = re.compile(r"([a-zA-Z_][\w.]*):([a-zA-Z_]\w*)")
"""The strategy of another package."""


def build_strategy(
    workload: Any,
    spec: WorkerSpec,
    device: torch.device,
    open_backup: Callable[[], Backup] = NoBackup,
) -> Strategy:
    """The strategy that `spec.parallel` names, with the state at step 0.

    "module:function" names a function with these parameters. open_backup: makes this worker's side
    of peer memory, if the strategy needs one. Raises WrongInput; the user's own exceptions pass
    through.
    """
    if ELSEWHERE.fullmatch(spec.parallel):
        return _find(spec.parallel)(workload, spec, device, open_backup)
    if spec.parallel == "ddp":
        return build_replicated(workload, spec, device)
    # Imported here: replicas need not pay for FSDP2.
    from workers.parallel.sharded import build_sharded

    keeps_parameters = spec.parallel == "fsdp-grad-op"
    return build_sharded(workload, spec, device, open_backup(), keeps_parameters=keeps_parameters)


def _find(parallel: str) -> Callable[..., Strategy]:
    module, name = parallel.split(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise WrongInput(f"parallel={parallel!r} names no strategy: {error}") from error
