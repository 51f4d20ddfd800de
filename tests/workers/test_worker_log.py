"""A worker's log while the store cannot be reached."""

from types import SimpleNamespace

import pyarrow.fs
import pytest

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
    monkeypatch.setattr(pyarrow.fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    return store


@pytest.fixture
def worker(tmp_path, store):
    (tmp_path / "config.json").write_text("{}")
    store.folder = tmp_path
    worker = object.__new__(Worker)
    worker._spec, worker._is_warm, worker._uploader = spec(), True, None
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
    worker._uploader = SimpleNamespace(join=lambda: "NETWORK_CONNECTION")
    worker._keep_log()
    said = f'log stays in {worker._log.path} reason="NETWORK_CONNECTION"'
    assert said in capsys.readouterr().err


def test_a_worker_whose_log_cannot_be_brought_goes_on(worker, monkeypatch, capsys):
    def uploader(path, place):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("workers.worker.reach_folder", lambda place: SimpleNamespace(local=None))
    monkeypatch.setattr("workers.worker.LogUploader", uploader)
    worker._log_to(PLACE)
    said = f'log stays in {worker._log.path} reason="Cannot allocate memory"'
    assert said in capsys.readouterr().err
    assert worker._uploader is None
