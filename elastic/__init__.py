"""Elastic PyTorch training on Ray clusters whose machines come and go. See README.md.

Importing this loads nothing else: each name comes when it is first asked for, and a process that
wants a part of the package pays for that part.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic import checkpoint, data
    from elastic.config import Checkpointing, FaultPolicy, Resources, RunConfig
    from elastic.driver.launch import Result, RunFailed, run
    from elastic.protocol.errors import StepCancelled, WrongInput
    from elastic.protocol.mesh import Parallel
    from elastic.workload import Workload

__all__ = [
    "Checkpointing",
    "FaultPolicy",
    "Parallel",
    "Resources",
    "Result",
    "RunConfig",
    "RunFailed",
    "StepCancelled",
    "Workload",
    "WrongInput",
    "checkpoint",
    "data",
    "run",
]
__version__ = "0.1.0"

_MODULES = {
    "elastic.config": ("Checkpointing", "FaultPolicy", "Resources", "RunConfig"),
    "elastic.driver.launch": ("Result", "RunFailed", "run"),
    "elastic.protocol.errors": ("StepCancelled", "WrongInput"),
    "elastic.protocol.mesh": ("Parallel",),
    "elastic.workload": ("Workload",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "data"):
        return import_module(f"elastic.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
