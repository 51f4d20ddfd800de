"""Tensors inside of what a module is called with or returns: tuples, dicts, dataclasses of it."""

from typing import Any

from torch import Tensor

from workers.torch_private.dispatch import tree_flatten


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
