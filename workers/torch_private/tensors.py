"""What torch's tensors keep to themselves: versions, DTensor's parts, operations on many at once.

torch's DTensor is not imported here: replicated runs need not pay for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

_torch: Any = torch
add_all_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _torch._foreach_add_
copy_all_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _torch._foreach_copy_
divide_all_: Callable[[Sequence[Tensor], float], None] = _torch._foreach_div_
multiply_all_: Callable[[Sequence[Tensor], float], None] = _torch._foreach_mul_
norms_of: Callable[[Sequence[Tensor]], Sequence[Tensor]] = _torch._foreach_norm

PLAIN_FUNCTIONS: Any = _torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a class of tensors: torch's functions see them as any others."""


def version_of(tensor: Tensor) -> int:
    """It grows with each change in place; 0 of one that counts none."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """What it is a view of."""
    return tensor._base


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local_tensor(dtensor: Tensor) -> Tensor:
    """A DTensor's part of this rank; shares its memory."""
    return cast(Any, dtensor)._local_tensor


def spec_of(sharded: Tensor) -> Any:
    """A DTensor's mesh, placements and meta data."""
    return cast(Any, sharded)._spec


def without_storage(kind: type, shape: Sequence[int], **named: Any) -> Any:
    """A tensor of a class of ours that has no memory."""
    return cast(Any, Tensor)._make_wrapper_subclass(kind, shape, **named)
