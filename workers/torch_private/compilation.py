"""What torch.compile tells of itself, in a process where somebody has asked for it."""

import sys
from collections.abc import Callable
from typing import Any

DYNAMO = "torch._dynamo"
"""torch's optimizers import it, which takes seconds."""


def hear_compilations(began: Callable[[Any], None], ended: Callable[[Any], None]) -> bool:
    """Have them called from now on; False while nobody has loaded torch.compile."""
    module: Any = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return False
    module.on_compile_start(began)
    module.on_compile_end(ended)
    return True


def num_compiled_graphs() -> int:
    """Of this process, until now."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
