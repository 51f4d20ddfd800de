"""The backward that is running in this thread, and what one that is to run does."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

_torch: Any = torch


def is_in_backward() -> bool:
    return _torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward at hand is over."""
    _torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_hooks_behind(leaf: Tensor) -> bool:
    """Somebody is told when a backward has added to its gradient."""
    return bool(cast(Any, leaf)._post_accumulate_grad_hooks)


def adds_once(results: Iterable[Tensor]) -> bool:
    """Whether the backward from these adds to the gradient of each leaf at most once: none of its
    operations is written in Python, which might compute a backward of its own."""
    todo = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, _torch.autograd.function.BackwardCFunction):
            return False
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return True
