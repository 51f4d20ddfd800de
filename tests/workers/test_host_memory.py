"""Memory that the rows of one generation leave to those of the next."""

import mmap

import torch

from elastic.protocol.mesh import Mesh, Parallel
from workers.parallel.shards import TensorLayout
from workers.resharding.host_memory import RowMemory

KINDS = [
    TensorLayout("w", torch.float32, (10, 4096), True),
    TensorLayout("b", torch.bfloat16, (7,), True),
    TensorLayout("n", torch.float32, (), False),
    TensorLayout("none", torch.float32, (3, 0), True),
]


def filled(memory, world_size, rank=0, kinds=KINDS):
    rows = memory.take(kinds, Mesh(Parallel.of("fsdp"), world_size), rank)
    for tensor in rows.values():
        tensor.fill_(world_size)
    return rows


def test_rows_are_storages_of_their_own_and_do_not_overlap():
    rows = filled(RowMemory(), 4)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in rows.items()} == {
        "w": (torch.float32, (3, 4096)),
        "b": (torch.bfloat16, (2,)),
    }  # what is replicated or empty is not its business
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in rows.values())
    rows["b"].zero_()
    assert (rows["w"] == 4).all()


def test_the_next_rows_are_where_the_last_ones_were():
    memory = RowMemory()
    before = filled(memory, 4)
    assert memory.is_used
    after = filled(memory, 3)
    assert after["w"].data_ptr() == before["w"].data_ptr()
    assert (after["w"] == 3).all()
    assert after["w"].shape[0] == 4


def test_what_the_next_rows_do_not_need_goes_back_to_the_system():
    memory = RowMemory()
    whole = filled(memory, 1)["w"]
    half = filled(memory, 2)["w"]
    assert (half == 2).all()
    assert (whole[5:] == 0).sum() >= (5 * 4096 - mmap.PAGESIZE // 4)


def test_a_bigger_state_gets_other_memory_and_the_rows_before_stay():
    memory = RowMemory()
    before = filled(memory, 1)["w"]
    bigger = [*KINDS, TensorLayout("m", torch.float32, (10, 4096), True)]
    after = filled(memory, 2, kinds=bigger)
    assert (before == 1).all()
    assert (after["m"] == 2).all()


def test_single_rows_can_go_back_and_no_others():
    memory = RowMemory()
    kinds = [TensorLayout(name, torch.float32, (10, 4096), True) for name in "abc"]
    rows = filled(memory, 1, kinds=kinds)
    elsewhere = torch.ones(4096)
    memory.discard(rows["b"])
    memory.discard(elsewhere)
    memory.discard(torch.empty(0))
    assert (rows["b"] == 0).sum() >= rows["b"].numel() - 2 * mmap.PAGESIZE // 4
    assert (rows["a"] == 1).all()
    assert (rows["c"] == 1).all()
    assert (elsewhere == 1).all()


def test_memory_without_rows_has_none_to_give_back():
    memory = RowMemory()
    assert memory.take([KINDS[2]], Mesh(Parallel.of("fsdp"), 1), 0) == {}
    memory.discard(torch.ones(8))
    assert not memory.is_used


def test_a_parameters_rows_have_room_for_fsdps_padding():
    """And an optimizer's have not."""
    kinds = [
        TensorLayout("model/w", torch.float32, (10, 3), True),
        TensorLayout("m", torch.float32, (10, 3), True),
    ]
    rows = RowMemory().take(kinds, Mesh(Parallel.of("fsdp"), 4), 3)
    assert {n: (len(t), t.untyped_storage().nbytes()) for n, t in rows.items()} == {
        "model/w": (1, 36),
        "m": (1, 12),
    }
