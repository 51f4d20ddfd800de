"""A worker's log while the store cannot be reached."""

from types import SimpleNamespace

import pyarrow.fs
import pytest

from elastic.store import remote
from tests.workers.session_rig import FakeLink, spec
from workers.checkpoint.saver import Saver
from workers.worker import Worker

PLACE = "s3://bucket/run"


@pytest.fixture
def store(monkeypatch):
    """pyarrow's part: whether the store answers each of the next times (always, in the end)."""
    answers, said = [], []

    def from_uri(place):
        said.append(answers.pop(0) if answers else True)
        if not said[-1]:
            raise OSError("When resolving region for bucket 'bucket': NETWORK_CONNECTION")
        return pyarrow.fs.LocalFileSystem(), str(store.folder)

    store = SimpleNamespace(answers=answers, said=said)
    filesystems = SimpleNamespace(FileSystem=SimpleNamespace(from_uri=from_uri))
    monkeypatch.setattr(remote, "arrow_fs", filesystems)
    return store


@pytest.fixture
def worker(tmp_path, store):
    (tmp_path / "config.json").write_text("{}")
    store.folder = tmp_path
    worker = object.__new__(Worker)
    worker._spec, worker._is_warm, worker._place = spec(), True, PLACE
    worker._built = SimpleNamespace(saver=Saver(FakeLink(), worker._spec))  # pyright: ignore
    folders = []
    worker._log = SimpleNamespace(
        path=tmp_path / "w0.log", collect=lambda: None, move_to=folders.append, folders=folders
    )
    return worker


def test_who_is_told_where_to_log_waits_for_a_store_that_is_away(worker, store):
    store.answers[:] = [True, False]
    worker._log_to(PLACE)
    assert store.said == [True, False, True]
    assert worker._log.folders == [store.folder / "logs"]


def test_a_log_that_cannot_be_brought_to_the_store_stays(worker, store, capsys):
    store.answers[:] = [False]
    worker._keep_log()
    assert f"log stays in {worker._log.path} reason=" in capsys.readouterr().err
