"""What a rank of a pipeline does in which order: forwards and backwards of its stages, as torch's
own schedules have them, also for numbers of micro-batches and ranks that torch refuses.

How long it takes is elastic/protocol/pipeline.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from elastic.protocol.errors import WrongInput
from elastic.protocol.mesh import BUILT_SCHEDULES

DEFAULT, INTERLEAVED = BUILT_SCHEDULES[-1], "Interleaved1F1B"


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["forward", "backward"]
    index: int
    """Of the micro-batch among those of the pipeline."""
    turn: int = 0
    """Which of the rank's stages."""


def check_schedule(schedule: str, device: torch.device) -> None:
    """WrongInput for one that is torch's and not here yet."""
    built = ", ".join(BUILT_SCHEDULES)
    if (schedule or DEFAULT) not in BUILT_SCHEDULES:
        raise WrongInput(f"schedule {schedule!r} is not available yet: choose one of {built}")
    if schedule == INTERLEAVED and device.type == "cuda":
        raise WrongInput(
            f"schedule {schedule!r} has messages of several stages between two ranks, which NCCL "
            f"does not tell apart: on GPUs choose 1F1B or GPipe"
        )


def actions(schedule: str, depth: int, place: int, num_microbatches: int) -> list[Action]:
    """Of a rank, in order. Each of its stages computes the backwards in the order of the forwards.

    depth: ranks of the pipeline.
    """
    if schedule == INTERLEAVED and depth > 1:
        return _interleaved(depth, place, num_microbatches)
    ahead = num_microbatches
    if (schedule or DEFAULT) == "1F1B":
        ahead = min(depth - place, num_microbatches)
    forwards = [Action("forward", i) for i in range(num_microbatches)]
    return _alternating(forwards, [Action("backward", i) for i in range(num_microbatches)], ahead)


def _interleaved(depth: int, place: int, num_microbatches: int) -> list[Action]:
    """Two stages in turn, for as many micro-batches at a time as there are ranks, or a few more."""
    num_rounds = max(1, num_microbatches // depth)
    forwards, backwards, at = list[Action](), list[Action](), 0
    for number in range(num_rounds):  # the larger ones first, else a backward would come too early
        size = num_microbatches // num_rounds + (number < num_microbatches % num_rounds)
        for turn in (0, 1):
            forwards += [Action("forward", i, turn) for i in range(at, at + size)]
            backwards += [Action("backward", i, 1 - turn) for i in range(at, at + size)]
        at += size
    first = -(-num_microbatches // num_rounds)
    return _alternating(forwards, backwards, first + 2 * (depth - 1 - place) + 1)


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[Action]:
    """So many forwards, then a backward and a forward by turns."""
    found = list(forwards[:ahead])
    for number, backward in enumerate(backwards):
        found.append(backward)
        found += forwards[ahead + number : ahead + number + 1]
    return found
