"""The state of a stage: the parameters of its blocks, whole or some of their rows, what the
optimizer keeps of these, and nothing of the others', which are empty.

See `workers.parallel.shards.SplitModel`. Buffers and scalars every rank has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from elastic.protocol.layout import ROWS, Position, TensorLayout
from workers.tensors.strides import laid_out
from workers.train_state.serialization import parameters_named


class StageParts:
    """Of one worker."""

    def __init__(
        self, model: nn.Module, device: torch.device, *, shares_rows: bool = False
    ) -> None:
        """Each parameter is whole, or on the meta device, until the first `place`. shares_rows: of
        those who need the same blocks each holds some rows of what these need."""
        self.model, self.device, self._shares_rows = model, device, shares_rows
        self.parameters = dict(model.named_parameters())
        self.whole = {
            name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            for name, p in self.parameters.items()
        }
        """By parameter, its shape and strides."""
        self.uses: Mapping[str, tuple[int, ...]] = {}
        """By parameter the blocks that need it, once they are known."""

    def layout(self, name: str, tensor: Tensor) -> TensorLayout:
        dtype, owner = str(tensor.dtype).removeprefix("torch."), self._owner(name)
        if owner is None or not tensor.dim() or not self.whole[owner].dim():
            return TensorLayout(name, dtype, tuple(tensor.shape))
        if tensor.shape != self.parameters[owner].shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, and its parameter another: under pp "
                "state of the optimizer must have its parameter's shape "
                "(torch.zeros_like(parameter)) or be a scalar"
            )
        return self._layout(name, dtype, owner)

    def has_rows(self, name: str) -> bool:
        """Whether the rows of this parameter, and of what the optimizer keeps of it, are shared."""
        whole = self.whole[name]
        return self._shares_rows and whole.dim() > 0 and whole.is_contiguous()

    def layout_of(self, parameter: str) -> TensorLayout:
        dtype = str(self.whole[parameter].dtype).removeprefix("torch.")
        return self._layout(f"model/{parameter}", dtype, parameter)

    def _layout(self, name: str, dtype: str, owner: str) -> TensorLayout:
        cuts = ROWS if self.has_rows(owner) else ()
        return TensorLayout(name, dtype, tuple(self.whole[owner].shape), cuts, self.uses[owner])

    def stored_layout(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorLayout:
        owner = self._owner(name)
        if owner is None or not shape or tuple(self.whole[owner].shape) != shape:
            return TensorLayout(name, dtype, shape)
        return self._layout(name, dtype, owner)

    def _owner(self, name: str) -> str | None:
        return next((n for n in parameters_named(name) if n in self.parameters), None)

    @torch.no_grad()
    def vacate(self) -> None:
        for name, parameter in self.parameters.items():
            if self.whole[name].dim():
                parameter.grad = None
                if not parameter.is_meta:
                    parameter.data = self._nothing_of(name)

    @torch.no_grad()
    def place(self, at: Position, given: dict[str, Tensor] | None) -> None:
        self.vacate()
        for name, parameter in self.parameters.items():
            whole = self.whole[name]
            layout = self.stored_layout(f"model/{name}", "", tuple(whole.shape))
            if not layout.is_cut:
                continue
            shape, value = layout.box(at).shape, given[name] if given is not None else None
            is_whole = shape == layout.shape
            if value is None and is_whole:
                value = torch.empty_strided(
                    whole.shape, whole.stride(), dtype=whole.dtype, device=self.device
                )
            elif value is None:
                value = torch.empty(shape, dtype=whole.dtype, device=self.device)
            elif is_whole:
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
