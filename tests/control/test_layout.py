"""Boxes of tensors, and which one each position of a mesh holds."""

import math
import random
from collections import Counter
from itertools import product

import pytest

from elastic.protocol.layout import ROWS, Box, Position, TensorLayout, cut, whole
from elastic.protocol.mesh import AXES, Mesh, Parallel


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*map(range, box.start, box.stop)))


def test_a_box_is_what_one_would_index_with():
    box = Box((2, 0), (2, 3))
    assert (str(box), box.stop, box.size) == ("[2:4, 0:3]", (4, 3), 6)
    assert str(whole(())) == "[]"
    assert whole(()).size == 1


def test_the_common_part_of_two_boxes_is_a_box_or_none():
    assert Box((0, 2), (4, 4)).intersection(Box((2, 0), (4, 3))) == Box((2, 2), (2, 1))
    assert Box((0, 0), (2, 2)).intersection(Box((2, 0), (2, 2))) is None
    assert Box((1,), (0,)).intersection(whole((4,))) is None
    assert whole(()).intersection(whole(())) == whole(())
    assert Box((4, 2), (1, 1)).relative_to(Box((3, 2), (2, 2))) == Box((1, 0), (1, 1))


def test_what_a_corner_leaves_of_a_box_is_all_the_rest_once():
    box = Box((1, 2, 0), (3, 4, 2))
    for shape in product((1, 3), (2, 4), (1, 2)):
        corner = Box(box.start, shape)
        left = box.without(corner)
        found = Counter(e for part in (corner, *left) for e in elements(part))
        assert found == Counter(elements(box))
        assert left == sorted(left, key=lambda b: b.start)


@pytest.mark.parametrize(
    ("start", "shape", "expected"),
    [
        ((1, 0, 0), (2, 3, 4), [range(12, 36)]),
        ((1, 1, 0), (1, 2, 4), [range(16, 24)]),
        ((0, 1, 0), (2, 1, 4), [range(4, 8), range(16, 20)]),
        ((1, 1, 1), (1, 2, 2), [range(17, 19), range(21, 23)]),
        ((0, 0, 0), (3, 0, 4), []),
    ],
)
def test_a_box_lies_in_as_few_stretches_as_there_are(start, shape, expected):
    assert list(Box(start, shape).runs(whole((3, 3, 4)))) == expected


def test_a_scalar_and_a_part_of_a_part_have_their_stretches():
    assert list(whole(()).runs(whole(()))) == [range(1)]
    assert list(Box((5,), (2,)).runs(Box((4,), (4,)))) == [range(1, 3)]


def test_a_dim_is_cut_as_fsdp2_cuts_it():
    assert [len(cut(8, 3, i)) for i in range(3)] == [3, 3, 2]
    assert [cut(4, 3, i) for i in range(3)] == [range(2), range(2, 4), range(4, 4)]


def test_two_axes_cut_two_dims():
    weight = TensorLayout("w", "float32", (4, 6), (("dp_shard", 0), ("tp", 1)))
    mesh = Mesh(Parallel.of("fsdp,tp:2"), 4)
    boxes = [weight.box(Position(mesh, rank)) for rank in range(4)]
    assert [str(box) for box in boxes] == ["[0:2, 0:3]", "[0:2, 3:6]", "[2:4, 0:3]", "[2:4, 3:6]"]
    assert weight.axes == ("dp_shard", "tp")


def test_of_two_axes_that_cut_one_dim_the_first_one_is_the_outer():
    weight = TensorLayout("w", "float32", (8,), (("tp", 0), ("dp_shard", 0)))
    mesh = Mesh(Parallel.of("fsdp,tp:2"), 4)
    assert [weight.box(Position(mesh, r)).start for r in range(4)] == [(0,), (4,), (2,), (6,)]


def test_who_stands_by_holds_what_is_not_cut_and_owns_nothing():
    mesh = Mesh(Parallel.of("hsdp:2"), 3)
    rows, scalar = (
        TensorLayout("w", "int8", (3, 2), (("dp_shard", 0),)),
        TensorLayout("s", "int8", ()),
    )
    assert rows.box(Position(mesh, 2)) == Box((0, 0), (0, 2))
    assert scalar.box(Position(mesh, 2)) == whole(())
    assert [t.own(Position(mesh, 2)) for t in (rows, scalar)] == [None, None]


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ((("rows", 0),), "w: 'rows' is no axis; choose from pp, dp_replicate, dp_shard, cp, tp"),
        ((("tp", 2),), "w: tp cuts dim 2 of shape [4, 6]"),
        ((("tp", -1),), "w: tp cuts dim -1 of shape [4, 6]"),
        ((("tp", 0), ("tp", 1)), "w: tp cuts two dims; a rank would hold no box"),
    ],
)
def test_a_layout_that_a_tensor_cannot_have_is_refused_with_a_line(cuts, says):
    with pytest.raises(ValueError, match=r".") as caught:
        TensorLayout("w", "float32", (4, 6), cuts)
    assert str(caught.value) == says


def some_mesh(dice: random.Random) -> Mesh:
    words = [dice.choice(("ddp", "fsdp", f"hsdp:{dice.randint(1, 3)}"))]
    words += [f"{axis}:{dice.randint(2, 3)}" for axis in ("tp", "cp", "pp") if dice.random() < 0.4]
    parallel = Parallel.of(",".join(words))
    world_size = parallel.ranks_per_microbatch * dice.randint(1, 7) + dice.randint(0, 1)
    order = list(range(world_size))
    dice.shuffle(order)
    return Mesh(parallel, world_size, tuple(order) if dice.random() < 0.5 else ())


def some_tensor(dice: random.Random) -> tuple[TensorLayout, Mesh]:
    """And a mesh whose axes cut it."""
    shape = tuple(dice.choice((0, 1, 2, 3, 4, 5, 7, 8)) for _ in range(dice.randint(0, 3)))
    axes = dice.sample(AXES, dice.randint(0, len(AXES)) if shape else 0)
    cuts = tuple((axis, dice.randrange(len(shape))) for axis in axes)
    return TensorLayout("t", "int8", shape, cuts), some_mesh(dice)


@pytest.mark.parametrize("seed", range(300))
def test_the_own_boxes_of_all_ranks_are_the_whole_tensor_once(seed):
    tensor, mesh = some_tensor(random.Random(seed))
    positions = [Position(mesh, rank) for rank in range(mesh.world_size)]
    owned = [box for box in map(tensor.own, positions) if box is not None]
    held = Counter(e for box in owned for e in elements(box))
    assert held == Counter(elements(whole(tensor.shape)))
    if not math.prod(tensor.shape):
        assert len(owned) == 1, "also a tensor without elements is somebody's"


CUTS = ((0, 2, 4), (0, 1, 4), (0, 4))
"""Pipelines of two, two and one stage of four blocks."""


@pytest.mark.parametrize("blocks", [(0,), (1,), (3,), (0, 3)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_each_row_of_a_stages_tensor_is_one_ranks_own(blocks: tuple[int, ...], rows: int):
    """Each segment is cut by its own number of ranks: blocks 0 and 1 have others."""
    mesh = Mesh(Parallel(data="fsdp-grad-op", pp=2), 6, (5, 0, 1, 2, 3, 4), CUTS)
    layout = TensorLayout("w", "float32", (rows, 3), ROWS, blocks)
    ranks = mesh.ranks_with_blocks(blocks)
    places = [Position(mesh, rank) for rank in range(6)]
    boxes = [layout.box(at) for at in places]
    assert all(box.size == 0 for rank, box in enumerate(boxes) if rank not in ranks)
    if len(ranks) == 1 or not rows:
        assert boxes[ranks[0]] == whole((rows, 3))
    else:
        assert max(box.shape[0] for box in boxes) == -(-rows // len(ranks))
    own = [(rank, box) for rank, at in enumerate(places) if (box := layout.own(at)) is not None]
    assert all(box == boxes[rank] for rank, box in own)
    found = sorted(row for _, box in own for row in range(box.start[0], box.stop[0]))
    assert found == list(range(rows))
    assert len(own) == 1 if not rows else all(box.size for _, box in own)
