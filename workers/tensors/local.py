"""Tensors of a state, whole or this rank's box of a sharded one.

A sharded tensor is a DTensor; torch's DTensor is not imported here, because replicated runs need
not pay for it. Who holds which box is elastic/protocol/layout.py's.
"""

from typing import Any, cast

import torch
from torch import Tensor

from elastic.protocol.layout import Box, TensorLayout
from workers.torch_private.tensors import is_dtensor, local_tensor, spec_of


def local(tensor: Tensor) -> Tensor:
    """This rank's box of a sharded tensor, or the tensor itself; shares its memory."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def is_shard(tensor: Tensor) -> bool:
    return is_dtensor(tensor)


def like(shard: Tensor, sharded: Tensor) -> Tensor:
    """`shard` as a tensor that is sharded as `sharded` is and has its global shape."""
    spec = spec_of(sharded)
    meta = spec.tensor_meta._replace(dtype=shard.dtype)
    new_spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return cast(Any, type(sharded.data))(shard, new_spec, requires_grad=False)


def layout_of(name: str, tensor: Tensor) -> TensorLayout:
    """As the axes of a sharded tensor's mesh cut it. ValueError for a tensor that is neither whole
    nor boxes of one: nobody could tell who holds what."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if not is_shard(tensor):
        return TensorLayout(name, dtype, shape)
    spec = spec_of(tensor)
    names, placements = spec.mesh.mesh_dim_names or (), spec.placements
    pairs = [(axis.partition("@")[0], p) for axis, p in zip(names, placements, strict=False)]
    cuts = tuple((axis, p.dim) for axis, p in pairs if p.is_shard())
    if not cuts or any(not p.is_replicate() for _, p in pairs if not p.is_shard()):
        raise ValueError(
            f"{name} is {placements} over the axes {names}, which is no box of it: state of the "
            "optimizer must have its parameter's shape (torch.zeros_like(parameter)) or be made "
            "without it"
        )
    return TensorLayout(name, dtype, shape, cuts)


def dtype_of(layout: TensorLayout) -> torch.dtype:
    return getattr(torch, layout.dtype)


def check_shard(shard: Tensor, layout: TensorLayout, box: Box) -> None:
    """ValueError if the layout misdescribes what this rank has."""
    if tuple(shard.shape) != box.shape:
        raise ValueError(
            f"{layout.name}: this rank has {list(shard.shape)} of {list(layout.shape)}, and its "
            f"layout says {box}"
        )


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """A box of a plain tensor; shares its memory."""
    for dim, (at, size) in enumerate(zip(box.start, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, size)
    return tensor


def flat_bytes(tensor: Tensor) -> Tensor:
    """In C order; shares the memory of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
