"""Half precision: a forward sees the parameters in another dtype than the state keeps them in.

State, gradients after a backward, reduction and optimizer are fp32; FSDP2 casts what it gathers
by the same rules (parallel/fsdp2_private). fp16's gradients are scaled: `LossScale`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from workers.torch_private.c10d import apply_to_tensors
from workers.torch_private.modules import BatchNorm, list_weights_anew, own_parameters

DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
GROWTH_STEPS = 2000


@dataclass(frozen=True, slots=True)
class LossScale:
    """A power of two, so that scaling changes no bit of what neither overflows nor vanishes.

    It follows from what was committed alone, so it is the same on every rank.
    """

    value: float = 2.0**16
    num_finite: int = 0
    """Committed steps since the last change."""

    def after(self, is_finite: bool) -> "LossScale":
        """Half after a skipped step, double after GROWTH_STEPS good ones."""
        if not is_finite:
            return LossScale(self.value / 2)
        if self.num_finite + 1 == GROWTH_STEPS:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.num_finite + 1)


def keeps_precision(module: nn.Module) -> bool:
    """Layers with running statistics, whose kernels want these and the parameters in one dtype."""
    return isinstance(module, BatchNorm)


def is_cast(module: nn.Module, parameter: Tensor) -> bool:
    """Scalars stay as they are: they do not decide a result's dtype."""
    is_wanted = parameter.is_floating_point() and parameter.dim() > 0
    return is_wanted and not keeps_precision(module)


def cast_inputs(
    model: nn.Module, blocks: list[nn.Module], dtype: torch.dtype, is_half: Callable[[], bool]
) -> None:
    """Floating arguments of the model and its blocks become `dtype`, the model's results fp32.

    is_half: whether a forward meets parameters of that dtype now.
    """

    def on_call(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_half():
            return None
        to = partial(_cast, dtype)
        return apply_to_tensors(to, args), apply_to_tensors(to, kwargs)

    def on_return(_: nn.Module, args: Any, result: Any) -> Any:
        return apply_to_tensors(partial(_cast, torch.float32), result) if is_half() else None

    for module in {id(m): m for m in (model, *blocks)}.values():
        if not keeps_precision(module):
            module.register_forward_pre_hook(on_call, with_kwargs=True)
    model.register_forward_hook(on_return)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class Casting:
    """Puts casts of whole parameters into the modules, for one step or evaluation.

    Their gradients reach the parameters upcast, as a reducer expects them. The same casts serve
    every micro-batch: they save nothing for a backward.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """dtype: None casts nothing."""
        self._dtype = dtype
        self.is_applied = False
        self._places = [
            (module, name, parameter)
            for module in (model.modules() if dtype else ())
            for name, parameter in own_parameters(module).items()
            if parameter is not None and is_cast(module, parameter)
        ]

    def cast(self) -> None:
        """From now on the modules hold casts."""
        made: dict[nn.Parameter, Tensor] = {}
        for module, name, parameter in self._places:
            if parameter not in made:
                made[parameter] = parameter.to(self._dtype)
            own_parameters(module)[name] = cast(Any, made[parameter])
        self.is_applied = True
        self._refresh()

    def restore(self) -> None:
        """The modules hold the parameters again; nothing happens if they do already."""
        for module, name, parameter in self._places:
            own_parameters(module)[name] = parameter
        self.is_applied = False
        self._refresh()

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """In which its uses add up its gradient in a backward."""
        is_cast = any(p is parameter for _, _, p in self._places)
        return self._dtype if is_cast and self._dtype is not None else parameter.dtype

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.cast()
        try:
            yield
        finally:
            self.restore()

    def _refresh(self) -> None:
        """Recurrent layers keep a list of their own."""
        for module in {m for m, _, _ in self._places if isinstance(m, nn.RNNBase)}:
            list_weights_anew(module)
