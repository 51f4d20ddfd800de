"""What ranks of a pipeline do in which order: as torch has it where torch takes the numbers, never
a wait for what comes later, and as long as the plan says."""

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import FORWARD, FULL_BACKWARD

from elastic.protocol.pipeline import num_turns
from workers.parallel.pipeline.schedule import Action, actions

INTERLEAVED = "Interleaved1F1B"


def torchs(depth: int, num_microbatches: int) -> list[list[Action]]:
    """Of each rank, by torch's own class, without a process group."""
    theirs: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = depth, 2
    theirs._n_microbatches = num_microbatches
    theirs.number_of_rounds = max(1, num_microbatches // depth)
    theirs.microbatches_per_round = num_microbatches // theirs.number_of_rounds
    theirs._has_backward = True
    words: dict[Any, Any] = {FORWARD: "forward", FULL_BACKWARD: "backward"}
    found: list[list[Action]] = []
    for rank in range(depth):
        told = [x for x in theirs._calculate_single_rank_operations(rank) if x is not None]
        kinds = [words[x.computation_type] for x in told]
        pairs = zip(kinds, told, strict=True)
        found.append([Action(k, x.microbatch_index, x.stage_index // depth) for k, x in pairs])
    return found


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_interleaved_stages_do_what_torchs_own_schedule_does(depth: int):
    """For all numbers of micro-batches that torch takes."""
    taken = [m for m in range(1, 25) if m % max(1, m // depth) == 0]
    assert len(taken) > 10
    for count in taken:
        ours = [actions(INTERLEAVED, depth, place, count) for place in range(depth)]
        assert ours == torchs(depth, count), count


def ends_at(schedule: str, depth: int, num_microbatches: int) -> int:
    """When the last rank is done, if a forward takes one unit and a backward two."""
    todo = [actions(schedule, depth, place, num_microbatches) for place in range(depth)]
    last_stage = depth * (1 + max(a.turn for a in todo[0])) - 1
    ends: dict[tuple[str, int, int], int] = {}
    free, is_stuck = [0] * depth, False
    while any(todo):
        assert not is_stuck, "they wait for each other"
        is_stuck = True
        for place, left in enumerate(todo):
            while left:
                kind, index, stage = left[0].kind, left[0].index, left[0].turn * depth + place
                needed = (kind, stage - 1, index)
                if kind == "backward":
                    needed = (kind, stage + 1, index)
                    needed = needed if stage < last_stage else ("forward", stage, index)
                if needed[1] >= 0 and needed not in ends:
                    break
                free[place] = max(free[place], ends.get(needed, 0)) + 1 + (kind == "backward")
                ends[kind, stage, index] = free[place]
                left.pop(0)
                is_stuck = False
    return max(free)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", INTERLEAVED])
def test_no_rank_waits_for_what_comes_later_and_a_step_takes_what_the_plan_says(schedule: str):
    for depth in range(1, 7):
        for num_microbatches in range(1, 26):
            each = 2 if schedule == INTERLEAVED else 1
            turns = num_turns(num_microbatches, depth, each)
            found = ends_at(schedule, depth, num_microbatches)
            assert found == 3 * turns, (depth, num_microbatches)


def test_a_rank_of_an_interleaved_pipeline_waits_half_as_long():
    """(p - 1) / (v m + p - 1) of the time."""
    for depth, count, share in ((2, 4, 1 / 9), (2, 8, 1 / 17), (4, 4, 3 / 11), (4, 16, 3 / 35)):
        assert 1 - 3 * 2 * count / ends_at(INTERLEAVED, depth, count) == pytest.approx(share)
