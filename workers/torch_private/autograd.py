"""The backward that is running in this thread."""

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch


def is_in_backward() -> bool:
    return _torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward at hand is over."""
    _torch.autograd.Variable._execution_engine.queue_callback(callback)
