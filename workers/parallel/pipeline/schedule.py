"""What a stage does in which order: forwards and backwards of its micro-batches, as torch's own
schedules have them, also where there are fewer micro-batches than stages, which torch refuses.

How long it takes is elastic/protocol/pipeline.py's.
"""

from dataclasses import dataclass
from typing import Literal

from elastic.protocol.errors import WrongInput
from elastic.protocol.mesh import BUILT_SCHEDULES

DEFAULT = BUILT_SCHEDULES[-1]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["forward", "backward"]
    index: int
    """Of the micro-batch among those of the pipeline."""


def check_schedule(schedule: str) -> None:
    """WrongInput for one that is torch's and not here yet."""
    if (schedule or DEFAULT) not in BUILT_SCHEDULES:
        built = ", ".join(BUILT_SCHEDULES)
        raise WrongInput(f"schedule {schedule!r} is not available yet: choose one of {built}")


def actions(schedule: str, depth: int, stage: int, num_microbatches: int) -> list[Action]:
    """Of a stage, in order. Every schedule computes the backwards in the order of the forwards."""
    ahead = num_microbatches
    if (schedule or DEFAULT) == "1F1B":
        ahead = min(depth - stage, num_microbatches)
    found = [Action("forward", i) for i in range(ahead)]
    for i in range(num_microbatches):
        found.append(Action("backward", i))
        if ahead + i < num_microbatches:
            found.append(Action("forward", ahead + i))
    return found
