"""The state of a stage: whole parameters of its blocks, what the optimizer keeps of these, and
nothing of the others', which are empty.

See `workers.parallel.shards.SplitModel`. Buffers and scalars every rank has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from elastic.protocol.layout import Position, TensorLayout
from workers.tensors.strides import laid_out
from workers.train_state.serialization import parameters_named


class StageParts:
    """Of one worker."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Each parameter is whole, or on the meta device, until the first `place`."""
        self.model, self.device = model, device
        self._parameters = dict(model.named_parameters())
        self.whole = {
            name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for name, p in self._parameters.items()
        }
        """By parameter, its shape and strides."""
        self.uses: Mapping[str, tuple[int, ...]] = {}
        """By parameter the blocks that need it, once they are known."""

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        dtype, owner = str(tensor.dtype).removeprefix("torch."), self._owner(name)
        if owner is None or not tensor.dim() or not self.whole[owner].dim():
            return TensorLayout(name, dtype, tuple(tensor.shape))
        if tensor.shape != self._parameters[owner].shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and its parameter another: under pp "
                "state of the optimizer must have its parameter's shape "
                "(torch.zeros_like(parameter)) or be a scalar"
            )
        return TensorLayout(name, dtype, tuple(self.whole[owner].shape), (), self.uses[owner])

    def stored_layout(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorLayout:
        owner = self._owner(name)
        if owner is None or not shape or tuple(self.whole[owner].shape) != shape:
            return TensorLayout(name, dtype, shape)
        return TensorLayout(name, dtype, shape, (), self.uses[owner])

    def _owner(self, name: str) -> str | None:
        return next((n for n in parameters_named(name) if n in self._parameters), None)

    @torch.no_grad()
    def vacate(self) -> None:
        for name, parameter in self._parameters.items():
            if self.whole[name].dim():
                parameter.grad = None
                if not parameter.is_meta:
                    parameter.data = self._nothing_of(name)

    @torch.no_grad()
    def place(self, at: Position, given: dict[str, Tensor] | None) -> None:
        self.vacate()
        for name, parameter in self._parameters.items():
            whole = self.whole[name]
            layout = self.stored_layout(f"model/{name}", "", tuple(whole.shape))
            if not layout.is_cut:
                continue
            is_here = layout.box(at).shape == layout.shape
            value = given[name] if given is not None else None
            if not is_here:
                value = self._nothing_of(name) if value is None else value
            elif value is None:
                value = torch.empty_strided(
                    whole.shape, whole.stride(), dtype=whole.dtype, device=self.device
                )
            else:
                value = laid_out(value, whole.stride())
            if parameter.is_meta:  # a tensor keeps the device that it was made on
                made = nn.Parameter(value, requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
            else:
                parameter.data = value
            if given is not None:
                given[name] = value

    def _nothing_of(self, name: str) -> Tensor:
        whole = self.whole[name]
        return torch.empty((0, *whole.shape[1:]), dtype=whole.dtype, device=self.device)

    def as_live(self, name: str, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        return shard
