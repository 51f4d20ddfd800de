"""The grammar of `parallel`, and who is where in a mesh."""

import pytest

from elastic.protocol.mesh import AXES, DATA_WORDS, Mesh, Parallel, microbatch_ids

V = 8


@pytest.mark.parametrize(
    "text",
    [
        "ddp",
        "fsdp",
        "fsdp-grad-op",
        "hsdp:1",
        "hsdp:4",
        "fsdp,tp:2",
        "hsdp:4,pp:2/1F1B,tp:8,cp:2,ep:4",
        "pp:4/ZBVZeroBubble",
    ],
)
def test_words_and_value_are_each_other_s_inverse(text):
    assert str(Parallel.of(text)) == text


def test_the_same_axes_are_the_same_value_in_whatever_order_they_are_given():
    assert Parallel.of("tp:2,hsdp:4") == Parallel("hsdp", dp_shard=4, tp=2)
    assert Parallel.of("pp:2/gpipe") == Parallel(pp=2, schedule="GPipe")
    assert Parallel.of("ddp,pp:2") == Parallel.of("pp:2") == Parallel(pp=2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "parallel='' is unknown: choose one of ddp, fsdp, fsdp-grad-op, hsdp:S"),
        ("hsdp", "parallel='hsdp': give hsdp:S, where S is the number of ranks in a replica"),
        ("hsdp:0", "parallel='hsdp:0': give hsdp:S, where S is the number of ranks in a replica"),
        ("tp:2,hsdp:04", "parallel='tp:2,hsdp:04': give hsdp:S, where S is the number of ranks in"),
        ("hsdps:4,x", "parallel='hsdps:4,x' is unknown"),
        ("fsdp, tp:2", "parallel='fsdp, tp:2' is unknown"),
        ("ddp,fsdp", "parallel='ddp,fsdp' says twice what the data axis is: leave one word out"),
        ("tp:2,tp:4", "parallel='tp:2,tp:4' says twice what tp is: leave one word out"),
        ("tp:1", "parallel='tp:1': tp:1 is no axis, leave it out"),
        ("pp:2/2F2B", "parallel='pp:2/2F2B': schedule '2F2B' is unknown: choose one of GPipe, "),
        ("pp:0", "parallel='pp:0': give pp:S or pp:S/Schedule, where S is the number of stages"),
        ("fsdp,pp:", "parallel='fsdp,pp:': give pp:S or pp:S/Schedule, where S is the number of"),
        ("pp:1", "parallel='pp:1': pp:1 is no axis, leave it out"),
        ("pp:2/GPipe,pp:2", "parallel='pp:2/GPipe,pp:2' says twice what pp is: leave one word out"),
        (
            "pp:2/loopedbfs",
            "parallel='pp:2/loopedbfs': schedule 'LoopedBFS' computes the backwards",
        ),
        ("tp:2/1F1B", "parallel='tp:2/1F1B': schedule '1F1B' is a pipeline's, and there is none"),
    ],
)
def test_words_that_say_no_mesh_are_refused_with_a_line(text, says):
    with pytest.raises(ValueError, match=r".") as caught:
        Parallel.of(text)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data": "zero"}, "data='zero' is unknown: choose one of ddp, fsdp, fsdp-grad-op, hsdp"),
        ({"data": "hsdp"}, "hsdp needs dp_shard, the number of ranks in a replica"),
        ({"dp_shard": 4}, "dp_shard is hsdp's: ddp takes the ranks that are there"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"pp": True}, "pp must be at least 1, got True"),
    ],
)
def test_values_that_say_no_mesh_are_refused_with_a_line(values, says):
    with pytest.raises(ValueError, match=r".") as caught:
        Parallel(**values)
    assert str(caught.value) == says


@pytest.mark.parametrize("data", DATA_WORDS)
@pytest.mark.parametrize("others", [{}, {"tp": 2}, {"pp": 2, "cp": 2}])
def test_every_active_rank_has_one_place_and_every_microbatch_one_place_on_the_data_axes(
    data, others
):
    parallel = Parallel(data, dp_shard=2 if data == "hsdp" else None, **others)
    for world_size in range(1, 14):
        mesh = Mesh(parallel, world_size)
        active = [r for r in range(world_size) if not mesh.is_inactive(r)]
        places = {tuple(mesh.coordinate(axis, r) for axis in AXES) for r in active}
        assert len(places) == len(active) == mesh.num_active
        assert all(not mesh.ids(V, r) for r in range(world_size) if mesh.is_inactive(r))
        ids = sorted(i for r in active for i in mesh.ids(V, r))
        together = parallel.ranks_per_microbatch
        assert ids == ([i for i in range(V) for _ in range(together)] if active else [])


def test_ranks_that_compute_a_microbatch_together_have_the_same_ids():
    mesh = Mesh(Parallel("fsdp", tp=2), 7)
    assert [mesh.dp_rank(r) for r in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [list(mesh.ids(V, r)) for r in range(6)] == [[0, 3, 6]] * 2 + [[1, 4, 7]] * 2 + [
        [2, 5]
    ] * 2
    assert mesh.is_inactive(6), "tp:2 has no use for it alone"


def test_neighbours_on_an_axis_differ_on_that_axis_only():
    mesh = Mesh(Parallel("hsdp", dp_shard=2, tp=2), 8)
    assert mesh.along("tp", 5) == [4, 5]
    assert mesh.along("dp_shard", 5) == mesh.replica_of(5) == [5, 7]
    assert mesh.along("dp_replicate", 5) == [1, 5]
    staged = Mesh(Parallel("ddp", pp=2), 6)
    assert staged.along("pp", 4) == [1, 4]
    assert staged.along("dp_replicate", 4) == [3, 4, 5]


def test_ranks_hold_all_of_a_state_if_they_have_one_of_each_shard():
    fsdp, hsdp = Mesh(Parallel("fsdp"), 3), Mesh(Parallel("hsdp", dp_shard=2), 5)
    assert fsdp.is_covered_by({0, 1, 2})
    assert not fsdp.is_covered_by({0, 2})
    assert hsdp.is_covered_by({0, 3})
    assert not hsdp.is_covered_by({0, 2})
    assert not hsdp.is_covered_by({0, 4}), "the last one is inactive"
    grid = Mesh(Parallel("fsdp", tp=2), 5)
    assert grid.is_covered_by({0, 1, 2, 3})
    assert not grid.is_covered_by({0, 1, 2, 4})
    assert not Mesh(Parallel("fsdp", tp=2), 1).is_covered_by({0})


def test_ranks_hold_all_of_a_model_in_stages_if_they_have_each_block():
    cuts = ((0, 1, 3), (0, 3))
    mesh = Mesh(Parallel(pp=2), 3, cuts=cuts)
    assert mesh.is_covered_by({2})
    assert mesh.is_covered_by({0, 1})
    assert not mesh.is_covered_by({0})
    with_rows = Mesh(Parallel("fsdp-grad-op", pp=2), 3, cuts=cuts)
    assert with_rows.is_covered_by({0, 1, 2})
    assert not with_rows.is_covered_by({0, 1}), "each row of a block is one rank's"


def test_too_few_ranks_for_the_model_s_axes_are_nobody_s_mesh():
    mesh = Mesh(Parallel(tp=4), 3)
    assert (mesh.num_active, mesh.dp_degree) == (0, 0)


@pytest.mark.parametrize("data", ["ddp", "fsdp-grad-op"])
def test_without_rounds_a_rank_s_ids_are_contiguous(data):
    for world_size in range(1, 9):
        mesh = Mesh(Parallel(data), world_size)
        assert [mesh.ids(V, r) for r in range(world_size)] == [
            microbatch_ids(V, world_size, r) for r in range(world_size)
        ]
