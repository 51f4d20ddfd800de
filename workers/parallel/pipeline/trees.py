"""Tensors inside of whatever a module is called with or returns: tuples, dicts, dataclasses of it.

The one file of the pipeline that imports a private module of torch; it has no public one for this.
"""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["tensors_in", "tree_flatten", "tree_map_only", "tree_unflatten"]


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
