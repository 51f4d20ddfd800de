"""A state put together again when what was there a moment ago is gone."""

import pytest
import torch

from elastic.protocol.mesh import Mesh
from elastic.protocol.pairing import HolderAt
from workers.groups import Alone
from workers.parallel.regather import Regather, is_whole
from workers.parallel.row_memory import RowMemory
from workers.parallel.shards import RowsLost
from workers.peer_memory.holder import HolderServer
from workers.peer_memory.shelf import Copy, Key, Slice, crc32

KEY = Key(1, 0, 7)


class Forgetful(HolderServer):
    """Has a copy when it is asked, and none when it is read."""

    def _have(self):
        said = super()._have()
        self.shelf._copies.clear()
        return said


class Damaging(HolderServer):
    """Its memory fails between two questions."""

    def _read(self, connection, asked):
        self.shelf.copy(KEY).content[0] ^= 1
        super()._read(connection, asked)


@pytest.mark.parametrize("kind", [Forgetful, Damaging])
def test_the_last_copy_gone_between_two_questions_is_rows_lost(kind):
    server, content = kind("127.0.0.1", "t"), bytearray(4)
    piece = Slice("model/w", "float32", (1,), True, 0, 1, 4)
    sums = (crc32(memoryview(content)),)
    server.shelf.put(Copy(KEY, 1, 1, {}, (piece,), content, sums))
    where = [HolderAt("n", *server.address)]
    search = Regather(Alone(), Mesh("fsdp", 1), [], where, "t", torch.device("cpu"), RowMemory())
    with pytest.raises(RowsLost):
        search.run(7, 7, dict)
    server.close()


def test_one_rank_of_each_shard_is_a_whole_state():
    fsdp, hsdp = Mesh("fsdp", 3), Mesh("hsdp:2", 5)
    assert is_whole(fsdp, {0, 1, 2})
    assert not is_whole(fsdp, {0, 2})
    assert is_whole(hsdp, {0, 3})
    assert not is_whole(hsdp, {0, 2})
    assert not is_whole(hsdp, {0, 4}), "the last one stands by"
