"""`weights_sha256`: one hash for a model's weights, whatever wraps, shards or stores them."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def weights_sha256(
    weights: nn.Module | Mapping[str, object], tell: Callable[[], None] = lambda: None
) -> str:
    """SHA-256 over a full state dict: parameters and persistent buffers, tied ones per name.

    tell: called after each tensor.
    """
    state = full_state(weights) if isinstance(weights, nn.Module) else weights
    tensors = {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}
    return hash_of(((name, tensors[name]) for name in sorted(tensors)), tell)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that counts: inside DDP, without wrapper names and non-tensor extra state."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    state = cast(dict[str, object], model.state_dict())
    return {plain_name(n): t.detach() for n, t in state.items() if isinstance(t, Tensor)}


def plain_name(name: str) -> str:
    """The parameter's name in `build_model()`, without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The contiguous little-endian bytes of a dense tensor, from host memory."""
    assert sys.byteorder == "little"
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"a {tensor.layout} tensor of {tensor.dtype} has no plain bytes")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(cast(Any, plain.reshape(-1).view(torch.uint8).numpy()))


def hash_of(tensors: Iterable[tuple[str, Tensor]], tell: Callable[[], None] = lambda: None) -> str:
    """The hash of (name, tensor) pairs that come in order of their names.

    tell: called after each tensor.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        shape = ",".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(tensor_bytes(tensor))
        tell()
    return digest.hexdigest()
