"""Elastic PyTorch training on Ray clusters whose machines come and go. See README.md.

Importing this loads neither ray nor torch; they come when something runs.
"""

from typing import TYPE_CHECKING, Any

from elastic.config import Checkpointing, FaultPolicy, Resources, RunConfig
from elastic.protocol.errors import StepCancelled, WrongInput
from elastic.protocol.mesh import Parallel
from elastic.workload import Workload

if TYPE_CHECKING:
    from elastic import checkpoint, data
    from elastic.driver.launch import Result, RunFailed, run

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


def __getattr__(name: str) -> Any:
    if name == "data":  # pyarrow loads here
        import importlib

        return importlib.import_module("elastic.data")
    if name in ("Result", "RunFailed", "run"):
        import importlib

        module = importlib.import_module("elastic.driver.launch")
        found = {n: getattr(module, n) for n in ("Result", "RunFailed", "run")}
        globals().update(found)
        return found[name]
    if name == "checkpoint":
        import importlib

        return importlib.import_module("elastic.checkpoint")
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
