"""What a step keeps of each micro-batch that this rank computed, until the vote takes it.

Records of committed steps are in membership/step_log.py; gradients are the reducers'.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from workers.step.loss import check_weight
from workers.step.vote import MicrobatchRecord

Logged = dict[str, float | torch.Tensor]


def kept(value: float | torch.Tensor) -> float | torch.Tensor:
    """A value to be logged, as it is now. A tensor stays on its device, because to read it before
    the step's end would wait for the device. Raises what float() raises."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    return float(value)


class Microbatches:
    """In id order; losses and logged values stay on their device until `records`."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | None] = []
        self._rows: list[np.ndarray] = []
        self._logged: list[Logged] = []

    def __len__(self) -> int:
        return len(self._losses)

    def add(
        self,
        loss: torch.Tensor,
        weight: torch.Tensor | None,
        rows: np.ndarray,
        logged: Logged,
    ) -> None:
        self._losses.append(loss.detach())
        self._weights.append(weight)
        self._rows.append(rows)
        self._logged.append(logged)

    def log_late(self, values: Logged) -> None:
        """Values logged after the last backward belong to the last micro-batch."""
        if self._logged:  # else this rank stands by
            self._logged[-1] = {**self._logged[-1], **values}

    def records(
        self,
        ids: Iterable[int],
        hashes: Sequence[tuple[int, ...]],
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[MicrobatchRecord]:
        """Losses and logged values come to the host here, once per step. hashes: of the integer
        buffers, by id. read: of the step's group. WrongInput for a weight that is no count."""
        if not self._losses:  # this rank stands by
            return []
        weights = ([] if w is None else [w] for w in self._weights)
        columns = zip(self._losses, weights, self._logged, strict=True)
        values = [v for loss, w, logged in columns for v in (loss, *w, *logged.values())]
        numbers = _numbers(values, read)
        return [
            MicrobatchRecord(
                i,
                next(numbers),
                weight_of(i, None if weight is None else next(numbers)),
                rows,
                hashed,
                {name: next(numbers) for name in logged},
            )
            for i, weight, rows, hashed, logged in zip(
                ids, self._weights, self._rows, hashes, self._logged, strict=True
            )
        ]


def _numbers(
    values: Sequence[float | torch.Tensor], read: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[float]:
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
