"""Which rank takes which position of a plan: as many pipelines lie on one node as fit, then as few
bytes move as can."""

import random
from collections.abc import Sequence
from itertools import permutations

import pytest

from elastic.protocol.pipeline import PipelinePlan, plan_pipeline
from elastic.protocol.rank_order import Blocks, Holding, order_ranks
from elastic.protocol.schedule import SCHEDULES

EVEN = {(block,): 10 for block in range(12)}
"""Bytes of twelve blocks."""
Sizes = dict[Blocks, int]


def lacks(plan: PipelinePlan, has: Holding, sizes: Sizes, position: int) -> int:
    """Bytes that a rank gets from others, to have what that position has."""
    wanted, had = set(plan.blocks(position)), set(has.blocks)
    needed = [blocks for blocks in sizes if wanted.intersection(blocks)]
    return sum(sizes[blocks] for blocks in needed if not had.intersection(blocks))


def moved(plan: PipelinePlan, ranks: Sequence[Holding], sizes: Sizes, order: Sequence[int]) -> int:
    return sum(lacks(plan, has, sizes, at) for has, at in zip(ranks, order, strict=True))


def nodes_of(plan: PipelinePlan, ranks: Sequence[Holding], order: Sequence[int]) -> list[set[str]]:
    """Of each pipeline."""
    found: list[set[str]] = [set() for _ in plan.pipelines]
    for rank, has in enumerate(ranks):
        seat = plan.seat(order[rank])
        if seat is not None:
            found[seat.pipeline].add(has.node)
    return found


def members(plan: PipelinePlan, nodes: str = "") -> list[Holding]:
    """Of a generation with this plan, by position."""
    return [Holding(nodes[at : at + 1], plan.blocks(at), at) for at in range(plan.num_ranks)]


def some_ranks(dice: random.Random, num_ranks: int, costs: list[int], nodes: str) -> list[Holding]:
    """Newcomers, members of an earlier generation, and some that have whatever they may."""
    num_blocks, ranks = len(costs), list[Holding]()
    old = members(plan_pipeline(dice.randint(1, 3), dice.randint(1, 7), costs, 8))
    for rank in range(num_ranks):
        node = dice.choice(nodes)
        kind = dice.choice(("new", "old", "old", "old", "any"))
        has = dice.choice(old) if kind == "old" else Holding()
        if kind == "any":
            blocks = dice.sample(range(num_blocks), dice.randint(0, num_blocks))
            has = Holding("", tuple(sorted(blocks)), rank)
        ranks.append(Holding(node, has.blocks, has.position))
    return ranks


def some_case(seed: int, nodes: str) -> tuple[PipelinePlan, list[Holding], Sizes]:
    dice = random.Random(seed)
    costs = [dice.randint(1, 9) for _ in range(dice.randint(1, 8))]
    schedule = dice.choice(("", *SCHEDULES))
    plan = plan_pipeline(dice.randint(1, 4), dice.randint(1, 6), costs, 8, schedule)
    sizes = {(block,): dice.randint(1, 50) for block in range(len(costs))}
    if len(costs) > 1:
        sizes[0, len(costs) - 1] = dice.randint(1, 90)  # as a tied embedding
    return plan, some_ranks(dice, plan.num_ranks, costs, nodes), sizes


@pytest.mark.parametrize("seed", range(80))
def test_of_all_orders_none_moves_fewer_bytes(seed: int):
    plan, ranks, sizes = some_case(seed, nodes="a")
    orders = permutations(range(plan.num_ranks))
    least = min(moved(plan, ranks, sizes, order) for order in orders)
    assert moved(plan, ranks, sizes, order_ranks(plan, ranks, sizes)) == least


@pytest.mark.parametrize("seed", range(80))
def test_no_order_has_more_pipelines_on_one_node_and_of_those_like_it_none_moves_fewer_bytes(
    seed: int,
):
    """First to the positions on one node, then to the others, for those who are left."""
    plan, ranks, sizes = some_case(seed, nodes="aab")
    order = order_ranks(plan, ranks, sizes)
    on_nodes = nodes_of(plan, ranks, order)

    def is_inside(position: int) -> bool:
        seat = plan.seat(position)
        return seat is not None and len(on_nodes[seat.pipeline]) == 1

    def moved_inside(order: Sequence[int]) -> int:
        pairs = zip(ranks, order, strict=True)
        return sum(lacks(plan, has, sizes, at) for has, at in pairs if is_inside(at))

    orders = [(o, nodes_of(plan, ranks, o)) for o in permutations(range(plan.num_ranks))]
    most = max(sum(len(nodes) == 1 for nodes in of_each) for _, of_each in orders)
    assert sum(len(nodes) == 1 for nodes in on_nodes) == most
    whole = [nodes for nodes in on_nodes if len(nodes) == 1]
    alike = [
        o for o, of_each in orders if [n for n in of_each if n in whole or len(n) == 1] == whole
    ]
    assert moved_inside(order) == min(map(moved_inside, alike))
    same = [o for o in alike if all(a == b for a, b in zip(o, order, strict=True) if is_inside(b))]
    assert moved(plan, ranks, sizes, order) == min(moved(plan, ranks, sizes, o) for o in same)


def test_with_two_pipelines_or_more_a_loss_moves_less_than_if_all_behind_it_moved_up():
    """Of 8 ranks one, of 120 bytes: three pipelines of 3, 2 and 2 stages instead of four of 2."""
    old = members(plan_pipeline(2, 8, (1,) * 12, 16))
    plan = plan_pipeline(2, 7, (1,) * 12, 16)
    assert [p.depth for p in plan.pipelines] == [3, 2, 2]
    found, moved_up = list[int](), list[int]()
    for lost in range(8):
        ranks = [has for rank, has in enumerate(old) if rank != lost]
        found.append(moved(plan, ranks, EVEN, order_ranks(plan, ranks, EVEN)))
        moved_up.append(moved(plan, ranks, EVEN, range(7)))
    assert found == [20] * 8
    assert moved_up == [60, 20, 20, 60, 120, 180, 240, 300]


def test_a_newcomer_takes_the_place_that_leaves_most_with_the_others():
    """Of one pipeline of four ranks, of which one is lost."""
    three, four = (plan_pipeline(4, size, (1,) * 12, 8) for size in (3, 4))
    ranks = [*members(three), Holding()]
    order = order_ranks(four, ranks, EVEN)
    assert order == (0, 1, 3, 2)
    assert (moved(four, ranks, EVEN, order), moved(four, ranks, EVEN, range(4))) == (40, 60)


def test_members_who_lose_nobody_stay_and_those_with_the_same_keep_their_order():
    plan = plan_pipeline(2, 6, (1,) * 12, 24)
    assert order_ranks(plan, members(plan), EVEN) == tuple(range(6))
    turned = members(plan)[::-1]
    assert order_ranks(plan, turned, EVEN) == (5, 4, 3, 2, 1, 0)
    smaller = plan_pipeline(2, 4, (1,) * 12, 24)
    assert order_ranks(smaller, members(plan)[2:], EVEN) == (0, 1, 2, 3)


def test_ranks_that_have_nothing_take_what_is_left_in_the_order_that_is_given():
    plan = plan_pipeline(2, 4, (1,) * 12, 8)
    assert order_ranks(plan, [Holding()] * 4, EVEN) == (0, 1, 2, 3)
    assert order_ranks(plan, [Holding()] * 4, EVEN, (0, 2, 1, 3)) == (0, 2, 1, 3)
    nodes = [Holding(node) for node in "abab"]
    assert order_ranks(plan, nodes, EVEN) == (0, 2, 1, 3)
    ranks = [Holding(), Holding("", plan.blocks(1), 1), Holding(), Holding("", plan.blocks(0))]
    assert order_ranks(plan, ranks, EVEN) == (2, 1, 3, 0)


def test_a_state_of_an_earlier_step_is_nothing_to_stay_for():
    """But for the step that was cut off, of which some have seen the end."""
    plan = plan_pipeline(2, 4, (1,) * 12, 24)
    first, last = plan.blocks(0), plan.blocks(1)
    ranks = [Holding("", first, 0, 6), Holding("", last, 1, 7), Holding("", last, 3, 7)]
    assert order_ranks(plan, [*ranks, Holding("", last, 1, 5)], EVEN) == (0, 1, 3, 2)
    assert order_ranks(plan, [Holding("", last, 1, 5), *ranks], EVEN) == (2, 0, 1, 3)


def test_who_has_nothing_stands_by_before_who_has_something():
    plan = plan_pipeline(2, 4, (1,) * 12, 1)
    assert plan.num_active == 2
    ranks = [Holding(), *members(plan)[:2], Holding()]
    assert order_ranks(plan, ranks, EVEN) == (2, 0, 1, 3)
