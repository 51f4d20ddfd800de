"""What a rank of a pipeline does in which order: forwards and backwards of its stages, as torch's
own schedules have them, also for numbers of micro-batches and ranks that torch refuses.

Which stages a rank has, and how long a step takes, is elastic/protocol/schedule.py's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic.protocol.schedule import GPIPE, INTERLEAVED, ZERO_BUBBLE

Kind = Literal["forward", "backward", "inputs", "weights"]
"""A backward may be in two halves: the gradients of what the stage received, and then those of its
parameters."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    index: int
    """Of the micro-batch among those of the pipeline."""
    turn: int = 0
    """Which of the rank's stages."""


def actions(schedule: str, depth: int, place: int, num_microbatches: int) -> list[Action]:
    """Of a rank, in order. Each of its stages computes the backwards in the order of the forwards.

    depth: ranks of the pipeline.
    """
    if schedule == INTERLEAVED and depth > 1:
        return _interleaved(depth, place, num_microbatches)
    if schedule == ZERO_BUBBLE and depth > 1:
        return _zero_bubble(depth, place, num_microbatches)
    ahead = num_microbatches if schedule == GPIPE else min(depth - place, num_microbatches)
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


def _zero_bubble(depth: int, place: int, num_microbatches: int) -> list[Action]:
    """Down the stages and back, so that the first rank has the loss. Weights fill the end."""
    most = max(num_microbatches, 2 * depth - 1)  # what is too many is left out in the end
    ahead = depth - place
    down, back = _Part("forward", 0), _Part("forward", 1)
    inputs, weights = [_Part("inputs", i) for i in (0, 1)], [_Part("weights", i) for i in (0, 1)]
    first, second = ([inputs[i], weights[i]] for i in (0, 1))
    parts = [down] * (2 * ahead - 1) + [back, down] * place + [back, *second] * ahead
    parts += [down, *first, back, *second] * (most - depth - ahead + 1)
    parts += [*first, back, *second] * (ahead - 1)
    parts += inputs * place + first * ahead + [weights[1]] * place + [weights[0]] * place
    found, done = list[Action](), Counter[_Part]()
    for part in parts:
        found.append(Action(part.kind, done[part], part.turn))
        done[part] += 1
    return [action for action in found if action.index < num_microbatches]


class _Part(NamedTuple):
    """Of a step, of the next micro-batch that has not had it."""

    kind: Kind
    turn: int


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> list[Action]:
    """So many forwards, then a backward and a forward by turns."""
    found = list(forwards[:ahead])
    for number, backward in enumerate(backwards):
        found.append(backward)
        found += forwards[ahead + number : ahead + number + 1]
    return found
