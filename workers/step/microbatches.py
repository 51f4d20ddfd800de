"""How a step's micro-batches go through forward and backward on this rank (`Passes`, and the plain
way, a backward behind each forward), and what is kept of each until the vote takes it: the loss and
its weight, which are checked, the rows, and what was logged.

Records of committed steps are in membership/step_log.py; gradients are the reducers'
(workers/reduction/reducers.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from elastic.protocol.errors import WrongInput
from workers.reduction.reducers import Reducer
from workers.step.buffers import TrackedBuffers
from workers.step.vote import MicrobatchRecord

Logged = dict[str, float | torch.Tensor]
Read: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Loss = tuple[torch.Tensor, torch.Tensor | None]
"""To differentiate, and its weight or None."""


# --- through forward and backward ------------------------------------------------------
class Passes(Protocol):
    """Of one rank, for a generation."""

    in_backward: int
    """The micro-batch whose backward runs now, or has run last."""

    @property
    def has_loss(self) -> bool:
        """The forward that runs now, or has run last, ends in the loss, which counts here."""
        ...

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        """The micro-batch of each forward of a step; ids: this rank's, each once or more often."""
        ...

    def loader(self, loader: Any) -> Any:
        """What this rank's micro-batches come from; loader: the worker's own
        (`workers.data.loader.AnyLoader`)."""
        ...

    def begin(self, step: int) -> None:
        """Before the first micro-batch of every attempt at a step, after `step` committed ones."""
        ...

    def before_forward(self, microbatch_id: int) -> None:
        """The user's forward of it comes next."""
        ...

    def loss_of(self, returned: Any) -> Loss | None:
        """What the user's loss has returned, checked; None: another rank has it. WrongInput."""
        ...

    def backward(self, microbatch_id: int, loss: torch.Tensor | None, num_left: int) -> None:
        """The forward of a micro-batch has ended. Those backwards that are due now, each told to
        the reducer. loss: scaled; None as `loss_of` gave it. num_left: forwards that follow."""
        ...

    def reset(self) -> None:
        """After a forward or backward that may not have come to its end."""
        ...


class NoPasses:
    """Of a rank that computes no micro-batch."""

    in_backward = -1

    @property
    def has_loss(self) -> bool:
        return True

    def order(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def loader(self, loader: Any) -> Any:
        return loader

    def begin(self, step: int) -> None:
        pass

    def before_forward(self, microbatch_id: int) -> None:
        pass

    def loss_of(self, returned: Any) -> Loss | None:
        raise AssertionError("this rank has no micro-batch")

    def backward(self, microbatch_id: int, loss: torch.Tensor | None, num_left: int) -> None:
        raise AssertionError("this rank has no micro-batch")

    def reset(self) -> None:
        pass


class PlainPasses(NoPasses):
    """Of a rank that computes whole micro-batches, one after another."""

    def __init__(self, reducer: Reducer, buffers: TrackedBuffers) -> None:
        self._reducer, self._buffers = reducer, buffers

    def loss_of(self, returned: Any) -> Loss:
        return check_loss(returned)

    def backward(self, microbatch_id: int, loss: torch.Tensor | None, num_left: int) -> None:
        assert loss is not None
        self.in_backward = microbatch_id
        self._reducer.before_backward(not num_left)
        loss.backward()
        self._reducer.after_backward(microbatch_id, self._buffers.end_microbatch())


# --- what is kept of them ---------------------------------------------------------------
def kept(value: float | torch.Tensor) -> float | torch.Tensor:
    """A value to be logged, as it is now. A tensor stays on its device, because to read it before
    the step's end would wait for the device. Raises what float() raises."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    return float(value)


@dataclass(frozen=True, slots=True)
class _Done:
    """One of them; loss, weight and logged values may be on a device."""

    loss: torch.Tensor
    weight: torch.Tensor | None
    rows: np.ndarray
    logged: Logged

    def values(self) -> list[float | torch.Tensor]:
        weight = [] if self.weight is None else [self.weight]
        return [self.loss, *weight, *self.logged.values()]


class Microbatches:
    """In id order; losses and logged values stay on their device until `records`."""

    def __init__(self) -> None:
        self._done: list[_Done] = []
        self._outside: Logged = {}

    def __len__(self) -> int:
        return len(self._done)

    def add(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | None,
        rows: np.ndarray,
        logged: Logged,
    ) -> None:
        self._done.append(_Done(loss.detach(), weight, rows, logged))

    def log_late(self, values: Logged) -> None:
        """Values logged after the last backward belong to the last micro-batch."""
        if not self._done:  # this rank is inactive, or another one has the loss
            self._outside.update(values)
            return
        last = self._done[-1]
        self._done[-1] = replace(last, logged={**last.logged, **values})

    def outside(self, read: Read) -> dict[str, float]:
        """What was logged on a rank without micro-batches of its own."""
        return dict(zip(self._outside, _numbers(list(self._outside.values()), read), strict=True))

    def records(
        self, ids: Iterable[int], hashes: Sequence[tuple[int, ...]], read: Read
    ) -> list[MicrobatchRecord]:
        """Losses and logged values come to the host here, once per step. hashes: of the integer
        buffers, by id. read: of the step's group. WrongInput for a weight that is no count."""
        if not self._done:  # this rank is inactive
            return []
        numbers = _numbers([value for done in self._done for value in done.values()], read)
        return [
            MicrobatchRecord(
                microbatch_id=i,
                loss=next(numbers),
                weight=weight_of(i, None if done.weight is None else next(numbers)),
                rows=done.rows,
                integer_hashes=hashed,
                logged={name: next(numbers) for name in done.logged},
            )
            for i, done, hashed in zip(ids, self._done, hashes, strict=True)
        ]


def _numbers(values: Sequence[float | torch.Tensor], read: Read) -> Iterator[float]:
    """In their order, by one read of each device."""
    found = [0.0 if isinstance(v, torch.Tensor) else v for v in values]
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, {})[i] = value.reshape(()).double()
    for tensors in by_device.values():
        numbers = read(torch.stack(list(tensors.values()))).tolist()
        for i, number in zip(tensors, numbers, strict=True):
            found[i] = number
    return iter(found)


def weight_of(microbatch_id: int, weight: float | torch.Tensor | None) -> float | None:
    of = f" of micro-batch {microbatch_id}"
    return None if weight is None else check_weight(float(weight), of)


def check_loss(loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss as (scalar to differentiate, weight or None). Raises WrongInput.

    The value of a weight on a GPU is not looked at: that would wait for the device.
    """
    total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        found = (
            f"a tensor of shape {tuple(total.shape)}"
            if isinstance(total, torch.Tensor)
            else type(total).__name__
        )
        raise WrongInput(
            f"loss() must return a scalar tensor (the mean over the micro-batch) or (sum, weight), "
            f"not {found}; reduce it, for example with .mean()"
        )
    if total.is_complex():
        raise WrongInput(
            f"loss() must return a real floating-point number, not {_named(total.dtype)}; take its "
            "real part or its .abs()"
        )
    if not total.requires_grad:
        raise WrongInput(
            "loss() returned a tensor without a gradient; compute it from the model's output"
        )
    return total.reshape(()), None if weight is None else _scalar(weight)


def check_weight(weight: float, of: str = "") -> float:
    """A weight is a count: a sum that is not finite skips the step, a weight never may. Raises
    WrongInput. of: which one, after a blank."""
    if not (math.isfinite(weight) and weight >= 0):
        raise WrongInput(
            f"loss()'s weight{of} is {weight:g}; it must be a finite number, 0 or more: how many "
            "samples or tokens the sum is over"
        )
    return weight


def _scalar(weight: Any) -> torch.Tensor:
    try:
        weight = torch.as_tensor(weight).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        found = type(weight).__name__
        raise WrongInput(f"loss()'s weight must be a number, not {found}") from error
    if weight.numel() != 1:
        raise WrongInput(f"loss()'s weight must be a scalar, not of shape {tuple(weight.shape)}")
    if weight.is_complex():
        raise WrongInput(f"loss()'s weight must be a real number, not {_named(weight.dtype)}")
    if weight.device.type == "cpu":
        check_weight(float(weight))
    return weight


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
