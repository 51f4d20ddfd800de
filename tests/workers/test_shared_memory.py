"""Own copies that a holder of the same node reads where they are."""

import gc
from dataclasses import replace

import pytest
import torch

from elastic.protocol import wire
from elastic.protocol.layout import Box, TensorLayout, whole
from elastic.protocol.messages.backup import (
    FROM_BACKUP,
    Copies,
    Have,
    Held,
    Push,
    Slice,
    Sums,
    Unshared,
)
from elastic.protocol.messages.direction import pack
from workers.backup.server import BackupServer, ask, connect, read_boxes
from workers.backup.shared import SharedArena
from workers.backup.store import Key, crc32
from workers.tensors.local import as_bytes

SHAPES = {"w": (torch.int32, (4, 2)), "n": (torch.float32, ())}
SLICES = (
    Slice(TensorLayout("w", "int32", (8, 2), (("dp_shard", 0),)), Box((2, 0), (4, 2)), 32),
    Slice(TensorLayout("n", "float32", ()), whole(()), 4),
)


@pytest.fixture
def connection():
    server = BackupServer("127.0.0.1", "t")
    with connect(server.address, "t", 60) as made:
        yield made
    server.close()


def filled(arena: SharedArena) -> dict[str, torch.Tensor]:
    arena.reserve(SHAPES.values())
    tensors = {name: arena.take(name, *what) for name, what in SHAPES.items()}
    tensors["w"].copy_(torch.arange(8).view(4, 2))
    tensors["n"].fill_(0.5)
    return tensors


def push(connection, tensors, shared, step=5, settled=None):
    connection.sendall(pack(Push((1, 0, step), 1, 2, {}, SLICES, settled, shared)))
    connection.sendall(pack(Sums(tuple(crc32(as_bytes(t)) for t in tensors.values()))))
    return type(FROM_BACKUP.read(*wire.receive(connection)))


def read(connection, step=5) -> torch.Tensor:
    found = torch.zeros(2, 2, dtype=torch.int32)
    read_boxes(connection, Key(1, 0, step), [("w", Box((3, 0), (2, 2)))], [as_bytes(found)])
    return found


def test_the_bytes_outlive_the_memory_of_who_wrote_them(connection):
    arena = SharedArena()
    tensors = filled(arena)
    assert push(connection, tensors, arena.describe(tensors)) is Held
    del arena, tensors
    gc.collect()
    assert read(connection).tolist() == [[2, 3], [4, 5]]


def test_memory_that_was_written_again_is_a_damaged_copy(connection):
    arena = SharedArena()
    tensors = filled(arena)
    assert push(connection, tensors, arena.describe(tensors)) is Held
    tensors["w"][0, 0] = 9
    with pytest.raises(LookupError, match="rank 0, step 5: w"):
        read(connection)
    assert ask(connection, Have()) == Copies(())


def test_steps_that_are_settled_let_go_of_their_memory(connection):
    arenas = SharedArena(), SharedArena()
    for step, arena in enumerate(arenas, start=5):
        tensors = filled(arena)
        settled = (1, 6) if step == 6 else None
        assert push(connection, tensors, arena.describe(tensors), step, settled) is Held
    assert [copy.key[2] for copy in ask(connection, Have()).copies] == [6]


def test_another_process_s_file_is_not_taken_for_it(connection):
    arena = SharedArena()
    tensors = filled(arena)
    shared = arena.describe(tensors)
    assert shared is not None
    for wrong in ({"inode": shared.inode + 1}, {"path": "/proc/1/fd/999"}):
        assert push(connection, tensors, replace(shared, **wrong)) is Unshared


def test_tensors_outside_of_the_arena_are_not_shared():
    arena = SharedArena()
    assert arena.describe({"n": torch.zeros(3)}) is None
    tensors = filled(arena)
    assert arena.describe({**tensors, "late": torch.zeros(3)}) is None


def test_memory_that_is_still_being_touched_is_given_to_nobody(monkeypatch):
    """The client's thread reserves while the main one copies what is left of the state."""
    arena, zero_, taken = SharedArena(), torch.Tensor.zero_, []

    def take_meanwhile(area):
        taken.append(arena.take("w", torch.int32, (4, 2)).fill_(7))
        return zero_(area)

    monkeypatch.setattr(torch.Tensor, "zero_", take_meanwhile)
    arena.reserve(SHAPES.values())
    assert taken[0].eq(7).all()


def test_memory_that_grows_keeps_what_is_in_it():
    arena = SharedArena()
    tensors = filled(arena)
    arena.reserve([*SHAPES.values(), (torch.uint8, (10_000,))])
    assert tensors["w"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert arena.describe(tensors) is None, "it is mapped anew: the old tensors are elsewhere"
    arena.give({})
    assert arena.take("w", *SHAPES["w"]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
