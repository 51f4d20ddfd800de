"""Tensors of a state, whole or this rank's rows of a sharded one.

A sharded tensor is a DTensor over dim 0; torch's DTensor is not imported here, because replicated
runs need not pay for it. Who holds which rows is parallel/shards.py's.
"""

from typing import Any, cast

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, or the tensor itself; shares its memory."""
    return cast(Tensor, getattr(tensor, "_local_tensor", tensor))


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def like(rows: Tensor, sharded: Tensor) -> Tensor:
    """`rows` as a tensor that is sharded as `sharded` is and has its global shape."""
    spec = cast(Any, sharded)._spec
    meta = spec.tensor_meta._replace(dtype=rows.dtype)
    kind = cast(Any, type(sharded.data))
    return kind(rows, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
