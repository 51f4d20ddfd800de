"""What an operation costs, by the shapes of its tensors: the same on every machine.

Floating-point operations as torch counts them, and one for each element that is written, so that
what only moves memory is not free.
"""

import math
from typing import Any, cast

import torch
from torch.utils.flop_counter import flop_registry

from workers.parallel.pipeline.trees import tensors_in
from workers.torch_private.dispatch import CUDNN_RNN, FLASH_ATTENTION_ON_CPU, packet_of

_aten = torch.ops.aten
_VIEWS = {"view", "t", "transpose", "permute", "expand", "slice", "select", "detach", "unsqueeze"}


def cost_of(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Of one operation that returned `result`."""
    returned = tensors_in(result)
    packet = packet_of(func)
    if packet.__name__ in _VIEWS:
        return 0
    written = sum(t.numel() for t in returned)
    count = cast(Any, flop_registry).get(packet)
    if count is not None:
        return written + float(count(*args, **kwargs, out_val=result))
    if packet is FLASH_ATTENTION_ON_CPU:
        query, key, value = args[:3]
        rows = math.prod(query.shape[:-1])
        return written + 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    if packet in (_aten.mkldnn_rnn_layer, CUDNN_RNN):
        tensors = tensors_in(args[1:])
        weights = sum(t.numel() for t in tensors if t.dim() == 2)
        return written + 2.0 * math.prod(args[0].shape[:-1]) * weights
    return written
