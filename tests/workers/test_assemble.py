"""A state put together again when what was there a moment ago is gone."""

import pytest

from elastic.protocol.backup_assignment import BackupAddress
from elastic.protocol.errors import PeerLost
from elastic.protocol.layout import TensorLayout, whole
from elastic.protocol.mesh import Mesh, Parallel
from elastic.protocol.messages.backup import Slice
from workers.backup.server import BackupServer
from workers.backup.store import Copy, Key, crc32
from workers.distributed.pieces import Pieces
from workers.distributed.process_group import Alone
from workers.resharding import assemble
from workers.resharding.assemble import Regather, ShardLost
from workers.resharding.host_memory import HostMemory

KEY = Key(1, 0, 7)
LAYOUT = TensorLayout("model/w", "float32", (1,), (("dp_shard", 0),))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Holders are threads of this process, which may not run for seconds on a busy machine."""
    monkeypatch.setattr(assemble, "HOLDER_S", 100.0)


class Forgetful(BackupServer):
    """Has a copy when it is asked, and none when it is read."""

    def _have(self):
        said = super()._have()
        self.store._copies.clear()
        return said


class Damaging(BackupServer):
    """Its memory fails between two questions."""

    def _read(self, connection, asked):
        self.store.copy(KEY).content[0] ^= 1
        super()._read(connection, asked)


@pytest.mark.parametrize("kind", [Forgetful, Damaging])
def test_the_last_copy_gone_between_two_questions_is_a_shard_lost(kind):
    server, content = kind("127.0.0.1", "t"), bytearray(4)
    piece = Slice(LAYOUT, whole((1,)), 4)
    sums = (crc32(memoryview(content)),)
    server.store.put(Copy(KEY, 1, 1, {}, (piece,), content, sums))
    where = [BackupAddress("n", *server.address)]
    pieces = Pieces(Alone(), lambda: None, 30.0)
    mesh = Mesh(Parallel.of("fsdp"), 1)
    search = Regather(Alone(), mesh, [], where, "t", memory=HostMemory(), pieces=pieces)
    with pytest.raises(ShardLost):
        search.run(7, 7, dict)
    server.close()


class Abandoning(BackupServer):
    """The generation is given up while a copy is on its way."""

    def __init__(self, group):
        self._group = group
        super().__init__("127.0.0.1", "t")

    def _read(self, connection, asked):
        self._group.abandon()
        super()._read(connection, asked)


def test_a_generation_given_up_while_copies_are_read_is_left():
    group, content = Alone(), bytearray(4)
    server, piece = Abandoning(group), Slice(LAYOUT, whole((1,)), 4)
    server.store.put(Copy(KEY, 1, 1, {}, (piece,), content, (crc32(memoryview(content)),)))
    where = [BackupAddress("n", *server.address)]
    pieces = Pieces(group, lambda: None, 30.0)
    search = Regather(
        group, Mesh(Parallel.of("fsdp"), 1), [], where, "t", memory=HostMemory(), pieces=pieces
    )
    with pytest.raises(PeerLost):
        search.run(7, 7, dict)
    server.close()


def test_a_step_that_nobody_could_report_is_not_gone_on_from():
    """Holders have it, the record ends before it, and who knew the steps between is lost."""
    server, content = BackupServer("127.0.0.1", "t"), bytearray(4)
    piece = Slice(LAYOUT, whole((1,)), 4)
    sums = (crc32(memoryview(content)),)
    server.store.put(Copy(KEY, 1, 1, {}, (piece,), content, sums))
    group, where = Alone(), [BackupAddress("n", *server.address)]
    pieces = Pieces(group, lambda: None, 30.0)
    search = Regather(
        group, Mesh(Parallel.of("fsdp"), 1), [], where, "t", memory=HostMemory(), pieces=pieces
    )
    with pytest.raises(ShardLost, match="up to step 6"):
        search.run(7, 6, dict)
    assert search.run(7, 7, dict).version == (7, 1)
    server.close()
