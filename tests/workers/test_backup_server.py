"""A holder over its sockets: what it takes, what it refuses, how it ends."""

import socket
import threading
from contextlib import suppress

import pytest

from elastic.protocol import wire
from elastic.protocol.layout import Box, TensorLayout, whole
from elastic.protocol.messages.backup import (
    FROM_BACKUP,
    Copies,
    Describe,
    Described,
    Have,
    Held,
    HeldCopy,
    Push,
    Refused,
    Slice,
    Sums,
)
from elastic.protocol.messages.direction import header_of, pack
from workers.backup.server import BackupServer, ask, connect, read_boxes
from workers.backup.store import Key, crc32
from workers.resharding.assemble import silence_s

SLICES = (
    Slice(TensorLayout("w", "uint8", (8, 2), (("dp_shard", 0),)), Box((2, 0), (4, 2)), 8),
    Slice(TensorLayout("n", "uint8", ()), whole(()), 1),
)


@pytest.fixture
def holder():
    server = BackupServer("127.0.0.1", "secret")
    yield server
    server.close()


def push(connection, generation=1, step=5, content=b"aabbccdd", settled=None):
    said = Push((generation, 0, step), generation, 2, {"a": 1}, SLICES, settled)
    wire.send(connection, header_of(said), [memoryview(content), memoryview(b"!")])
    sums = crc32(memoryview(b"aabbccdd")), crc32(memoryview(b"!"))
    connection.sendall(pack(Sums(sums)))
    return FROM_BACKUP.read(*wire.receive(connection))


def test_what_was_pushed_is_offered_described_and_read(holder):
    with connect(holder.address, "secret", 60) as connection:
        assert push(connection) == Held()
    with connect(holder.address, "secret", 60) as reader:  # the trainer is gone
        assert ask(reader, Have()) == Copies((HeldCopy((1, 0, 5), 1, 2, 9),))
        assert ask(reader, Describe((1, 0, 5))) == Described({"a": 1}, SLICES)
        assert ask(reader, Describe((1, 0, 6))) == Described(None, ())
        into = [bytearray(4), bytearray(1)]
        pieces = [("w", Box((3, 0), (2, 2))), ("n", whole(()))]
        read_boxes(reader, Key(1, 0, 5), pieces, [memoryview(b) for b in into])
        assert into == [b"bbcc", b"!"]
        with pytest.raises(LookupError, match="not held any more"):
            read_boxes(reader, Key(1, 0, 6), pieces, [memoryview(b) for b in into])


def test_damage_on_the_way_and_on_the_shelf_is_told(holder):
    with connect(holder.address, "secret", 60) as connection:
        assert push(connection, content=b"aabbXcdd") == Refused("rank 0, step 5: w")
        assert push(connection) == Held()
        holder.store.copy(Key(1, 0, 5)).content[0] ^= 1
        with pytest.raises(LookupError, match="rank 0, step 5: w"):
            read_boxes(
                connection, Key(1, 0, 5), [("w", Box((3, 0), (1, 2)))], [memoryview(bytearray(2))]
            )
        assert ask(connection, Have()) == Copies(())


class Large:
    """A copy of 40 GB: who reads its bytes without being asked for rows waits for ever."""

    key, origin, world_size, size_bytes = Key(1, 0, 5), 1, 2, 40 * 10**9
    cuts = lacks = ()

    def check(self, names=None) -> None:
        raise AssertionError("nobody has asked for its rows")


def test_what_a_holder_has_it_says_without_reading_it(holder):
    holder.store._copies[Large.key] = Large()
    with connect(holder.address, "secret", 60) as connection:
        assert ask(connection, Have()) == Copies((HeldCopy((1, 0, 5), 1, 2, 40 * 10**9),))


def test_a_reader_s_patience_grows_with_the_copy():
    assert silence_s(0) == 2.0
    assert silence_s(50 * 10**9) == 202.0


def test_a_generation_that_was_replaced_cannot_push(holder):
    with connect(holder.address, "secret", 60) as connection:
        assert push(connection, generation=2) == Held()
        refused = push(connection, generation=1, step=6)
        assert refused == Refused("generation 1, 2 has begun")


def test_without_the_run_s_token_the_connection_is_closed(holder):
    with connect(holder.address, "wrong", 60) as connection, pytest.raises(ConnectionError):
        ask(connection, Have())


def test_nonsense_closes_its_own_connection_only(holder):
    with socket.create_connection(holder.address, timeout=60) as connection:
        connection.sendall(b"\xff" * 64)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with connect(holder.address, "secret", 60) as connection:
        assert ask(connection, Have()) == Copies(())


def test_a_holder_ends_when_nobody_has_been_connected_for_its_lease(holder):
    waiting = threading.Thread(target=holder.wait_until_left, args=(0.2,), daemon=True)
    with connect(holder.address, "secret", 60) as connection:
        ask(connection, Have())
        waiting.start()
        waiting.join(0.6)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
