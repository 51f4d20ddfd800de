"""What ranks of a pipeline do in which order: as torch has it where torch takes the numbers, never
a wait for what comes later, and as long as the plan says."""

from itertools import combinations
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
)

from elastic.protocol.schedule import (
    INTERLEAVED,
    SCHEDULES,
    ZERO_BUBBLE,
    num_stages_of,
    num_thirds,
    stages_at,
)
from workers.parallel.pipeline.schedule import Action, actions

TORCHS: dict[str, Any] = {INTERLEAVED: ScheduleInterleaved1F1B, ZERO_BUBBLE: ScheduleZBVZeroBubble}
WORDS: dict[Any, Any] = {
    FORWARD: "forward",
    FULL_BACKWARD: "backward",
    BACKWARD_INPUT: "inputs",
    BACKWARD_WEIGHT: "weights",
}


def torchs(schedule: str, depth: int, num_microbatches: int) -> list[list[Action]]:
    """Of each rank, by torch's own class, without a process group."""
    theirs = TORCHS[schedule].__new__(TORCHS[schedule])
    theirs.pp_group_size, theirs.n_local_stages, theirs.num_stages = depth, 2, 2 * depth
    theirs._n_microbatches = num_microbatches
    theirs.number_of_rounds = max(1, num_microbatches // depth)
    theirs.microbatches_per_round = num_microbatches // theirs.number_of_rounds
    theirs._has_backward = True
    found: list[list[Action]] = []
    for rank in range(depth):
        told = [x for x in theirs._calculate_single_rank_operations(rank) if x is not None]
        kinds = [WORDS[x.computation_type] for x in told]
        pairs = zip(kinds, told, strict=True)
        found.append([Action(k, x.microbatch_index, x.stage_index // depth) for k, x in pairs])
    return found


@pytest.mark.parametrize("schedule", TORCHS)
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_ranks_of_two_stages_do_what_torchs_own_schedule_does(depth: int, schedule: str):
    """For all numbers of micro-batches that torch takes."""
    taken = [m for m in range(1, 25) if m % max(1, m // depth) == 0 or schedule == ZERO_BUBBLE]
    assert len(taken) > 10
    for count in taken:
        ours = [actions(schedule, depth, place, count) for place in range(depth)]
        assert ours == torchs(schedule, depth, count), count


def ends_at(schedule: str, depth: int, num_microbatches: int, shared: tuple[int, ...] = ()) -> int:
    """When the last rank is done, if a forward takes one unit and a backward two. shared: two
    stages that use the same parameter."""
    todo = [actions(schedule, depth, place, num_microbatches) for place in range(depth)]
    num_stages = num_stages_of(depth, schedule)
    ends: dict[tuple[str, int, int], int] = {}
    free, is_stuck = [0] * depth, False
    while any(todo):
        assert not is_stuck, "they wait for each other"
        is_stuck = True
        for place, left in enumerate(todo):
            while left:
                kind, index = left[0].kind, left[0].index
                stage = stages_at(place, num_stages, schedule)[left[0].turn]
                needed = set[tuple[str, int, int]]()
                if kind == "forward":
                    needed = {(kind, stage - 1, index)} if stage else set()
                elif kind != "weights":
                    is_last = stage == num_stages - 1
                    needed = {("forward", stage, index) if is_last else (kind, stage + 1, index)}
                if shared and stage == shared[0] and kind in ("backward", "weights"):
                    needed |= {(kind, shared[1], index)}
                if not needed <= ends.keys():
                    break
                free[place] = max(free[place], *(ends[n] for n in needed), 0)
                free[place] += 2 if kind == "backward" else 1
                ends[kind, stage, index] = free[place]
                left.pop(0)
                is_stuck = False
    return max(free)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_waits_for_what_comes_later_and_a_step_takes_what_the_plan_says(schedule: str):
    for depth in range(1, 7):
        for num_microbatches in range(1, 26):
            thirds = num_thirds(num_microbatches, depth, schedule)
            found = ends_at(schedule, depth, num_microbatches)
            assert found == thirds, (depth, num_microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_that_share_a_parameter_do_not_wait_for_each_other(schedule: str):
    """The first one that uses it waits for the gradient of the other's."""
    for depth in (2, 3, 4):
        for shared in combinations(range(num_stages_of(depth, schedule)), 2):
            for count in (1, 2, 3, 5, 8):
                ends_at(schedule, depth, count, shared)


def test_a_rank_of_an_interleaved_pipeline_waits_half_as_long():
    """(p - 1) / (v m + p - 1) of the time."""
    for depth, count, share in ((2, 4, 1 / 9), (2, 8, 1 / 17), (4, 4, 3 / 11), (4, 16, 3 / 35)):
        assert 1 - 3 * 2 * count / ends_at(INTERLEAVED, depth, count) == pytest.approx(share)
