"""Which boxes go from whom to whom: every element once, and from somebody who has it."""

import random
from collections import Counter
from itertools import product

import pytest

from elastic.protocol.layout import Box, Position, TensorLayout
from elastic.protocol.mesh import Mesh, Parallel
from tests.control.test_layout import elements, some_tensor
from workers.resharding.moves import COPY, Move, gentle_order, moves_of, plan

GRID, PAIR = Mesh(Parallel.of("fsdp,tp:2"), 4), Mesh(Parallel.of("fsdp,tp:2"), 2)
WEIGHT = TensorLayout("w", "float32", (4, 6), (("dp_shard", 0), ("tp", 1)))
CORNERS = [Box(start, (2, 3)) for start in product((0, 2), (0, 3))]


def everybody(mesh: Mesh) -> list[Position]:
    return [Position(mesh, rank) for rank in range(mesh.world_size)]


def test_quarters_become_halves_and_halves_quarters():
    to_pair = moves_of(WEIGHT, everybody(GRID), PAIR)
    a, b, c, d = CORNERS
    assert to_pair == [Move(0, 0, a), Move(2, 0, c), Move(1, 1, b), Move(3, 1, d)]
    to_grid = moves_of(WEIGHT, everybody(PAIR), GRID)
    assert to_grid == [Move(0, 0, a), Move(1, 1, b), Move(0, 2, c), Move(1, 3, d)]


def test_a_box_that_nobody_holds_is_named():
    with pytest.raises(LookupError, match=r"^nobody holds \[2:4, 3:6\] of w$"):
        moves_of(WEIGHT, everybody(GRID)[:3], PAIR)


def test_ones_own_comes_before_a_members_and_that_before_a_copy():
    left, right = (WEIGHT.box(at) for at in everybody(PAIR))
    held = [Position(PAIR, 0), Position(PAIR, 0), Position(PAIR, 0), Position(PAIR, 1)]
    moves = moves_of(WEIGHT, held, PAIR, [COPY, 1, 0, 1])
    assert moves == [Move(2, 0, left), Move(3, 1, right)]
    moves = moves_of(WEIGHT, held, PAIR, [COPY, 1, COPY, 1])
    assert moves == [Move(1, 0, left), Move(3, 1, right)]


def test_tensors_that_are_alike_are_planned_once():
    other = TensorLayout("v", "bfloat16", WEIGHT.shape, WEIGHT.cuts)
    one, two = plan([WEIGHT, other], everybody(GRID), PAIR, range(4))
    assert one is two


@pytest.mark.parametrize("seed", range(200))
def test_every_element_that_a_rank_is_to_hold_comes_once_from_one_who_has_it(seed):
    dice = random.Random(seed)
    tensor, old = some_tensor(dice)
    new = Mesh(old.parallel, max(1, old.world_size + dice.randint(-3, 3)))
    if new.num_active == 0:
        new = old
    held = everybody(old)
    moves = moves_of(tensor, held, new, [dice.choice((0, 1, COPY)) for _ in held])
    for move in moves:
        assert move.box.intersection(tensor.box(held[move.source])) == move.box
    for target in everybody(new):
        came = [m.box for m in moves if m.target == target.rank]
        assert Counter(e for box in came for e in elements(box)) == Counter(
            elements(tensor.box(target))
        )


def peaks(tensors, held, new, order) -> list[float]:
    """By rank the most that it has, as a share of what it has before or afterwards."""
    places = [Position(new, rank) for rank in range(new.world_size)]
    before = [[t.box(at).size for t in tensors] for at in held]
    after = [[t.box(at).size for t in tensors] for at in places]
    found: list[float] = []
    for old, fresh in zip(before, after, strict=True):
        has = most = sum(old)
        for number in order:
            most = max(most, has + fresh[number])
            has += fresh[number] - old[number]
        found.append(most / max(sum(old), sum(fresh)))
    return found


@pytest.mark.parametrize("kept", [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)], ids=str)
def test_blocks_are_exchanged_in_an_order_that_has_nobody_hold_the_old_and_the_new(kept):
    """Of two pipelines of two stages three ranks are left; and the way back."""
    parallel = Parallel(pp=2)
    two = Mesh(parallel, 4, (), ((0, 8, 16), (0, 8, 16)))
    three = Mesh(parallel, 3, (), ((0, 5, 10, 16),))
    names = [("model", 1), ("optimizer", 2)]  # as a state has them: all of one kind, then the other
    tensors = [
        TensorLayout(f"{kind}/{block}", "float32", (size, 4), (), (block,))
        for kind, size in names
        for block in range(16)
    ]
    held = [Position(two, rank) for rank in kept]
    order = gentle_order(tensors, held, three, range(3))
    assert sorted(order) == list(range(32))
    assert max(peaks(tensors, held, three, order)) <= 1.15
    back = [Position(three, rank) for rank in range(3)]
    order = gentle_order(tensors, back, two, range(3))
    assert max(peaks(tensors, [*back, Position(two, 3)], two, order)[:3]) <= 1.15


def test_rows_are_exchanged_in_the_order_that_they_come_in():
    mesh = Mesh(Parallel(data="fsdp"), 3)
    tensors = [TensorLayout(f"w{i}", "float32", (7, 2), (("dp_shard", 0),)) for i in range(5)]
    held = [Position(Mesh(Parallel(data="fsdp"), 2), rank) for rank in range(2)]
    assert gentle_order(tensors, held, mesh, (0, 1)) == [0, 1, 2, 3, 4]
