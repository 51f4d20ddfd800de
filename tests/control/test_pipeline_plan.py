"""The plan of a pipeline: cuts, depths and shares are the best there are, and are found at once."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.pipeline import (
    PipelinePlan,
    Seat,
    cuts_of,
    largest_stages,
    plan_pipeline,
)
from elastic.protocol.schedule import (
    INTERLEAVED,
    SCHEDULES,
    ZERO_BUBBLE,
    most_in,
    num_stages_of,
    num_thirds,
    place_of,
    stages_at,
)


def all_cuts(num_blocks: int, depth: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_blocks), depth - 1):
        yield (0, *inner, num_blocks)


def largest(costs: tuple[float, ...], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(cuts))


def depths_of(num_ranks: int, lowest: int, highest: int) -> Iterator[tuple[int, ...]]:
    """All ways to make pipelines of so many ranks, some of them left over."""
    yield ()
    for depth in range(lowest, min(highest, num_ranks) + 1):
        for others in depths_of(num_ranks - depth, depth, highest):
            yield (depth, *others)


def best_time(
    wanted: int, num_ranks: int, costs: tuple[int, ...], num_microbatches: int, schedule: str
) -> float:
    """By trying all depths, all cuts and, micro-batch by micro-batch, all useful shares."""
    deepest = max(1, len(costs) // (num_stages_of(2, schedule) // 2))
    lowest = min(wanted, num_ranks, deepest)
    highest = min(max(2 * wanted - 1, lowest), num_ranks, deepest)
    least = {
        d: min(largest(costs, cuts) for cuts in all_cuts(len(costs), num_stages_of(d, schedule)))
        for d in range(lowest, highest + 1)
    }
    time_of = lambda m, d: num_thirds(m, d, schedule) * least[d] / 3  # noqa: E731
    found = float("inf")
    for depths in depths_of(num_ranks, lowest, highest):
        if not depths:
            continue
        shares = [0] * len(depths)
        ends = lambda i, d, shares=shares: time_of(shares[i] + 1, d)  # noqa: E731
        for _ in range(num_microbatches):
            quickest = min(range(len(depths)), key=lambda i, ds=depths, e=ends: e(i, ds[i]))
            shares[quickest] += 1
        done = [time_of(m, d) for m, d in zip(shares, depths, strict=True) if m]
        found = min(found, max(done))
    return found


def check(plan: PipelinePlan, num_microbatches: int) -> None:
    """What holds for every plan."""
    assert plan.num_active <= plan.num_ranks
    ids = [i for p in plan.pipelines for i in p.ids]
    assert ids == list(range(num_microbatches))
    assert all(p.ids for p in plan.pipelines)
    for pipeline in plan.pipelines:
        assert pipeline.cuts[0] == 0
        assert pipeline.cuts[-1] == len(plan.costs)
        assert all(pipeline.blocks(s) for s in range(pipeline.num_stages))
        assert pipeline.largest == pytest.approx(largest(plan.costs, pipeline.cuts))
    for position in range(plan.num_ranks):
        seat = plan.seat(position)
        assert (seat is None) == (position >= plan.num_active) == (not plan.blocks(position))
        assert seat is None or plan.position(seat) == position
    assert [b for segment in plan.segments() for b in segment] == list(range(len(plan.costs)))
    for segment in plan.segments():
        positions = [p for p in range(plan.num_ranks) if segment.start in plan.blocks(p)]
        assert all(plan.positions_with(b) == positions for b in segment)
        assert len(positions) == len(plan.pipelines)


@pytest.mark.parametrize("schedule", ["1F1B", INTERLEAVED, ZERO_BUBBLE])
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster(seed: int, schedule: str):
    dice = random.Random(seed)
    costs = tuple(dice.randint(1, 9) for _ in range(dice.randint(1, 7)))
    num_ranks, wanted = dice.randint(1, 10), dice.randint(1, 5)
    num_microbatches = dice.randint(1, 20)
    plan = plan_pipeline(wanted, num_ranks, costs, num_microbatches, schedule)
    check(plan, num_microbatches)
    assert plan.time == best_time(wanted, num_ranks, costs, num_microbatches, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_so_many_micro_batches_fit_into_a_time(schedule: str):
    for depth in range(1, 7):
        takes = [num_thirds(count, depth, schedule) for count in range(40)]
        assert takes[1:] == sorted(set(takes[1:]))
        for thirds in range(takes[1], takes[39]):
            fits = max(count for count in range(40) if takes[count] <= thirds)
            assert most_in(thirds, depth, schedule) == fits


@pytest.mark.parametrize(
    ("schedule", "held", "idle"),
    [
        (INTERLEAVED, [(0, 1, 4, 5), (2, 3, 6, 7), ()], "0.06"),
        (ZERO_BUBBLE, [(0, 1, 6, 7), (2, 3, 4, 5), ()], "0.02"),
    ],
)
def test_a_rank_has_two_stages(schedule: str, held: list[tuple[int, ...]], idle: str):
    plan = plan_pipeline(2, 3, (1,) * 8, 8, schedule)
    assert [plan.blocks(position) for position in range(3)] == held
    words = f"1 pipeline of 4 stages on 2 ranks, 8 micro-batches; {idle} idle; 1 stands by"
    assert str(plan) == words
    mesh = Mesh(Parallel.of(f"pp:2/{schedule}"), 3, (), plan.cuts)
    assert ([mesh.blocks(rank) for rank in range(3)], mesh.num_active) == (held, 2)
    alone = plan_pipeline(2, 1, (1,) * 8, 8, schedule)
    assert alone.blocks(0) == tuple(range(8))
    assert replace(mesh, world_size=1, cuts=alone.cuts).blocks(0) == alone.blocks(0)
    warning = plan_pipeline(5, 5, (1,) * 8, 8, schedule).warnings(5, schedule)[0]
    assert "has 8 blocks, so a pipeline has at most as many stages (2 on a rank)" in warning


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_rank(schedule: str):
    for depth in range(1, 7):
        count = num_stages_of(depth, schedule)
        places = [place_of(stage, count, schedule) for stage in range(count)]
        for place in range(depth):
            stages = stages_at(place, count, schedule)
            assert list(stages) == [s for s in range(count) if places[s] == place]


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_are_no_whole_numbers_make_a_plan_too(seed: int):
    dice = random.Random(seed)
    costs = tuple(dice.uniform(0.1, 1e12) for _ in range(dice.randint(1, 12)))
    num_microbatches = dice.randint(1, 40)
    check(plan_pipeline(dice.randint(1, 4), dice.randint(1, 30), costs, num_microbatches),
          num_microbatches)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_cuts_minimise_the_largest_stage(seed: int):
    dice = random.Random(seed)
    costs = tuple(dice.randint(1, 20) for _ in range(dice.randint(1, 9)))
    for depth, least in enumerate(largest_stages(costs, len(costs)), 1):
        cuts = cuts_of(costs, depth)
        assert len(cuts) == depth + 1
        assert largest(costs, cuts) == least
        assert least == min(largest(costs, c) for c in all_cuts(len(costs), depth))


def throughput(plan: PipelinePlan, whole: PipelinePlan) -> float:
    return round(whole.time / plan.time, 3)


def test_a_loss_costs_what_the_design_says():
    of_four = [plan_pipeline(2, w, (1,) * 12, 16) for w in (4, 3, 2)]
    assert [throughput(p, of_four[0]) for p in of_four] == [1, 0.75, 0.529]
    assert [[p.depth for p in plan.pipelines] for plan in of_four] == [[2, 2], [3], [2]]
    of_eight = [plan_pipeline(2, w, (1,) * 12, 16) for w in (8, 7, 6, 5)]
    assert [throughput(p, of_eight[0]) for p in of_eight] == [1, 0.833, 0.75, 0.625]
    assert [sorted(p.depth for p in x.pipelines) for x in of_eight] == [
        [2, 2, 2, 2],
        [2, 2, 3],
        [3, 3],
        [2, 3],
    ]
    of_many = [plan_pipeline(4, w, (1,) * 32, 64) for w in (32, 31, 29)]
    assert [round(throughput(p, of_many[0]), 2) for p in of_many] == [1, 0.92, 0.90]


def test_fewer_ranks_than_wanted_form_one_pipeline_and_more_than_blocks_stand_by():
    assert [p.depth for p in plan_pipeline(4, 3, (1,) * 8, 8).pipelines] == [3]
    plan = plan_pipeline(8, 8, (1, 1, 1), 8)
    assert [p.cuts for p in plan.pipelines] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert plan.num_active == 6
    assert plan.seat(5) == Seat(1, 2)
    assert plan.seat(6) is None
    assert str(plan) == "2 pipelines of 3 stages, 4 micro-batches; 0.33 idle; 2 stand by"
    assert plan.warnings(8) == [
        "pp:8: the model has 3 blocks, so a pipeline has at most as many stages, and the rest of "
        "the ranks stands by",
        "pp:8: 3 stages, 4 micro-batches: 33% idle; give more micro-batches (a smaller "
        "micro_batch) or fewer stages",
    ]


def test_shares_are_even_among_equals_and_the_deeper_ones_come_first():
    plan = plan_pipeline(2, 5, (1,) * 12, 16)
    assert str(plan) == "2 pipelines of 3 and 2 stages, 9 and 7 micro-batches; 0.20 idle"
    assert [p.ids for p in plan.pipelines] == [range(9), range(9, 16)]
    assert [len(p.ids) for p in plan_pipeline(2, 6, (1,) * 2, 8).pipelines] == [3, 3, 2]
    assert plan_pipeline(2, 4, (1,) * 12, 16).warnings(2) == []


def test_16_stages_and_4_micro_batches_are_79_percent_idle():
    plan = plan_pipeline(16, 16, (1,) * 16, 4)
    assert plan.idle_share == pytest.approx(15 / 19)
    assert "16 stages, 4 micro-batches: 79% idle" in plan.warnings(16)[0]


def test_a_warning_tells_what_more_micro_batches_cannot_change():
    """Of two stages that cost 3 and 1, the second waits two thirds of the time."""
    says = "2 stages, 4 micro-batches: 47% idle, 33% as some stages cost more than others; give"
    assert says in plan_pipeline(2, 2, (3, 1), 4).warnings(2)[0]
    assert plan_pipeline(2, 2, (3, 1), 4000).idle_share == pytest.approx(1 / 3, abs=1e-3)
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        plan = plan_pipeline(2, 2, (3, 1, 3, 1), 4000, schedule)
        assert plan.uneven_share == pytest.approx(plan.idle_share, abs=1e-3) == 1 / 3


@pytest.mark.parametrize("costs", [(), (1, 0), (1, -1), (1, float("nan")), (float("inf"),)])
def test_costs_that_are_none_are_refused(costs: tuple[float, ...]):
    with pytest.raises(ValueError, match="every block costs more than 0"):
        plan_pipeline(2, 4, costs, 8)


@pytest.mark.parametrize("wanted", [2, 4, 8, 16])
def test_ten_thousand_ranks_and_two_hundred_blocks_are_planned_at_once(wanted: int):
    dice = random.Random(wanted)
    costs = tuple(dice.randint(10**9, 10**12) for _ in range(200))
    took = []
    for num_ranks in (10_000, 9_999, 9_973):
        began = time.process_time()
        plan = plan_pipeline(wanted, num_ranks, costs, 20_000)
        took.append(time.process_time() - began)
        check_some(plan)
    assert min(took) < 0.05, took


def check_some(plan: PipelinePlan) -> None:
    assert plan.num_active <= plan.num_ranks
    assert sum(len(p.ids) for p in plan.pipelines) == 20_000
    assert plan.idle_share < 0.5
