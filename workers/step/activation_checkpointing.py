"""Activation checkpointing: a block keeps its inputs only, and its backward runs it once more.

Randomness and buffers are those of the first run, so no bit depends on it. Which modules are
blocks is train_state/blocks.py's.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workers.torch_private.modules import own_buffers

IsChanging = Callable[[nn.Module, str], bool]


def recompute(blocks: list[nn.Module], is_changing: IsChanging) -> None:
    """Let these modules forget their activations; names and classes stay.

    is_changing: whether forwards change this buffer of this module.
    """
    for block in blocks:
        block.forward = _recomputed(block, is_changing)


def _recomputed(block: nn.Module, is_changing: IsChanging) -> Callable[..., Any]:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before = {
            (module, name): buffer.clone()
            for module in block.modules()
            for name, buffer in own_buffers(module).items()
            if buffer is not None and is_changing(module, name)
        }
        return nullcontext(), _buffers_as(before)

    @torch.compiler.disable(recursive=False)
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


@contextmanager
def _buffers_as(values: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    held = {(module, name): own_buffers(module)[name] for module, name in values}
    for (module, name), value in values.items():
        own_buffers(module)[name] = value
    try:
        yield
    finally:
        for (module, name), buffer in held.items():
            own_buffers(module)[name] = buffer
