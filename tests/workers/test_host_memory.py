"""Memory that the shards of one generation leave to those of the next."""

import ctypes
import mmap
import resource

import pytest
import torch

from elastic.protocol.layout import Position, TensorLayout
from elastic.protocol.mesh import Mesh, Parallel
from tests.workers.forking import forking
from workers.resharding.host_memory import HostMemory, give_back, keep_freed

ROWS = (("dp_shard", 0),)
LAYOUTS = [
    TensorLayout("w", "float32", (10, 4096), ROWS),
    TensorLayout("b", "bfloat16", (7,), ROWS),
    TensorLayout("n", "float32", ()),
    TensorLayout("none", "float32", (3, 0), ROWS),
]


def at(rank, world_size):
    return Position(Mesh(Parallel.of("fsdp"), world_size), rank)


def filled(memory, world_size, rank=0, layouts=LAYOUTS):
    shards = memory.take(layouts, at(rank, world_size))
    for tensor in shards.values():
        tensor.fill_(world_size)
    return shards


def test_rows_are_storages_of_their_own_and_do_not_overlap():
    rows = filled(HostMemory(), 4)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in rows.items()} == {
        "w": (torch.float32, (3, 4096)),
        "b": (torch.bfloat16, (2,)),
        "n": (torch.float32, ()),
        "none": (torch.float32, (1, 0)),
    }
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in rows.values())
    rows["b"].zero_()
    assert (rows["w"] == 4).all()


def test_the_next_rows_are_where_the_last_ones_were():
    memory = HostMemory()
    before = filled(memory, 4)
    assert memory.is_used
    after = filled(memory, 3)
    assert after["w"].data_ptr() == before["w"].data_ptr()
    assert (after["w"] == 3).all()
    assert after["w"].shape[0] == 4


def test_what_the_next_rows_do_not_need_goes_back_to_the_system():
    memory = HostMemory()
    whole = filled(memory, 1)["w"]
    half = filled(memory, 2)["w"]
    assert (half == 2).all()
    assert (whole[5:] == 0).sum() >= (5 * 4096 - mmap.PAGESIZE // 4)


def test_a_bigger_state_gets_other_memory_and_the_rows_before_stay():
    memory = HostMemory()
    before = filled(memory, 1)["w"]
    bigger = [*LAYOUTS, TensorLayout("m", "float32", (10, 4096), ROWS)]
    after = filled(memory, 2, layouts=bigger)
    assert (before == 1).all()
    assert (after["m"] == 2).all()


def test_single_rows_can_go_back_and_no_others():
    memory = HostMemory()
    layouts = [TensorLayout(name, "float32", (10, 4096), ROWS) for name in "abc"]
    rows = filled(memory, 1, layouts=layouts)
    elsewhere = torch.ones(4096)
    memory.drop([rows["b"], elsewhere, torch.empty(0)])
    assert (rows["b"] == 0).sum() >= rows["b"].numel() - 2 * mmap.PAGESIZE // 4
    assert (rows["a"] == 1).all()
    assert (rows["c"] == 1).all()
    assert (elsewhere == 1).all()


def test_memory_without_rows_has_none_to_give_back():
    memory = HostMemory()
    (scalar,) = memory.take([LAYOUTS[2]], at(0, 1)).values()
    assert scalar.shape == ()
    memory.drop([torch.ones(8)])
    assert not memory.is_used


def test_a_parameters_rows_have_room_for_fsdps_padding():
    """And an optimizer's have not."""
    layouts = [TensorLayout(name, "float32", (10, 3), ROWS) for name in ("model/w", "m")]
    rows = HostMemory().take(layouts, at(3, 4))
    assert {n: (len(t), t.untyped_storage().nbytes()) for n, t in rows.items()} == {
        "model/w": (1, 36),
        "m": (1, 12),
    }


def faults_of_a_step():
    """Page faults of tensors that a step makes and drops."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [torch.ones(1 << 20) for _ in range(8)]
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fewest_of_some_steps():
    """Where a small thing lies in the way, one of them has a tensor in a new place."""
    return min(faults_of_a_step() for _ in range(5))


def count_faults(sender):
    for option in (-1, -3):  # as a process begins: what this one's server has freed has moved them
        ctypes.CDLL(None).mallopt(option, 128 << 10)
    without = fewest_of_some_steps()
    keep_freed()
    kept = fewest_of_some_steps()
    give_back()
    sender.send((without, kept, faults_of_a_step()))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library of its own kind")
def test_a_step_takes_the_memory_of_the_one_before_once_freed_memory_is_kept():
    receiver, sender = forking().Pipe(duplex=False)
    process = forking().Process(target=count_faults, args=(sender,), daemon=True)
    process.start()
    without, kept, given_back = receiver.recv()
    process.join(60)
    pages = 8 * (4 << 20) // mmap.PAGESIZE
    assert without > pages / 4  # huge ones may be among them
    assert kept < pages / 10
    assert given_back > pages / 4
