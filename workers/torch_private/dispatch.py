"""Operations as torch dispatches them, and the trees of values that they are called with."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

_aten: Any = torch.ops.aten
ITEM = _aten._local_scalar_dense.default
"""What asks for the value of a tensor of one element."""
FLASH_ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
CUDNN_RNN = _aten._cudnn_rnn


def schema_of(operation: Any) -> Any:
    """Its name and arguments."""
    return operation._schema


def packet_of(operation: Any) -> Any:
    """All its overloads."""
    return operation._overloadpacket
