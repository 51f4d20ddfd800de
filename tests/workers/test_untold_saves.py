"""Saves that do not go on record: of a generation that is over, and of rows under another rank."""

from typing import Any

import pyarrow.fs
import pytest

from elastic.store.catalogue import Catalogue
from elastic.store.files import Folder
from tests.workers.places import Place
from tests.workers.session_rig import FakeLink
from tests.workers.sharded_rig import build, enter, spec
from workers.checkpoint.saver import Saver
from workers.distributed.process_group import Alone

pytestmark = pytest.mark.usefixtures("place")


class EndsWithTheGeneration:
    """A storage to which the last byte comes just before the save is given up."""

    def __init__(self, saver: Saver) -> None:
        self._saver, self._local = saver, pyarrow.fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def open_output_stream(self, path: str) -> Any:
        return Stream(self._local.open_output_stream(path), self._saver)


class Stream:
    def __init__(self, stream: Any, saver: Saver) -> None:
        self.write, self._stream, self._saver = stream.write, stream, saver

    def close(self) -> None:
        self._stream.close()
        self._saver.give_up(1)


def test_a_part_that_is_whole_when_its_generation_is_over_is_not_reported(tmp_path):
    link = FakeLink()
    saver, strategy = Saver(link, spec("ddp")), build("ddp")
    saver.catalogue = Catalogue(Folder(EndsWithTheGeneration(saver), str(tmp_path)))
    saver.begin(strategy.train_state, Place(1))
    saver._wait_moving()
    assert len(list(tmp_path.glob("*/*"))) == 1
    assert link.sent == []


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (0, 2)])
def test_a_shard_is_never_saved_as_that_of_another_rank_or_world(tmp_path, rank, world_size):
    """A run that ends names ranks that need not be those of the shards."""
    link, strategy = FakeLink(), build("fsdp")
    enter(strategy, Alone(), 0)
    saver = Saver(link, spec("fsdp"))
    saver.open(str(tmp_path))
    with pytest.raises(AssertionError):
        saver.begin(strategy.train_state, Place(1, rank, world_size, strategy.position))
    saver.begin(strategy.train_state, Place(1, position_of=strategy.position))
    saver._wait_moving()
    assert [kind for kind, _, _ in link.sent] == ["part_saved"]
