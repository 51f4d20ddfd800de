"""Folders: atomic writes, JSON without NaN, probes."""

import json
import math
from pathlib import Path

import pyarrow.fs as arrow_fs
import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.files import (
    Folder,
    encode,
    leave_probe,
    open_folder,
    read_json,
    remove_probe,
    sees_probe,
    write_json,
)
from elastic.store.remote import is_refused


@pytest.fixture(params=["local", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The same files, once as a local directory, once through a filesystem without append."""
    if request.param == "local":
        return Folder(None, str(tmp_path))
    return Folder(arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem()), "")


def test_a_file_that_is_written_twice_holds_the_second_content_and_leaves_nothing_else(folder):
    folder.write("a.json", b"one")
    folder.write("a.json", b"two", is_durable=False)
    assert (folder.read("a.json"), folder.names()) == (b"two", ["a.json"])


def test_a_missing_file_is_no_json_and_has_no_time(folder):
    assert (read_json(folder, "a"), folder.modified("a"), folder.exists("a")) == (None, None, False)


def test_deleting_a_missing_file_is_nothing(folder):
    folder.delete("a")
    assert folder.names() == []


def test_a_damaged_json_file_is_named(folder):
    folder.write("status.json", b'{"phase": "run')
    with pytest.raises(WrongInput, match=r"status\.json is damaged"):
        read_json(folder, "status.json")


def test_numbers_that_are_not_finite_become_null_at_any_depth():
    value = {"a": math.nan, "b": [1.5, -math.inf, (math.inf,)], "c": {"d": math.nan, "e": "NaN"}}
    assert json.loads(encode(value)) == {
        "a": None,
        "b": [1.5, None, [None]],
        "c": {"d": None, "e": "NaN"},
    }


def test_json_comes_back_as_it_was_written(folder):
    write_json(folder, "result.json", {"steps": 3, "loss": 0.1})
    assert read_json(folder, "result.json") == {"steps": 3, "loss": 0.1}


def test_a_file_uri_and_a_path_are_the_same_local_folder(tmp_path):
    assert open_folder(f"file://{tmp_path}").local == open_folder(str(tmp_path)).local == tmp_path


def test_an_unknown_kind_of_uri_is_one_line_that_names_it():
    with pytest.raises(WrongInput) as caught:
        open_folder("nosuch://bucket/x")
    assert "nosuch://bucket/x" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_probe_is_seen_in_the_same_storage_only(tmp_path):
    probe = leave_probe(str(tmp_path / "runs"))
    assert sees_probe(probe)
    remove_probe(probe)
    assert not sees_probe(probe)
    assert list((tmp_path / "runs").iterdir()) == []


def test_storage_that_is_a_file_is_wrong_input(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WrongInput, match="cannot be written"):
        leave_probe(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: 7", False),
        ("AWS Error SLOW_DOWN during GetObject operation", False),
        ("AWS Error INTERNAL_FAILURE during GetObject operation: 500", False),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", True),
        ("AWS Error NO_SUCH_BUCKET during PutObject operation", True),
        ("Bucket 'nowhere' not found", True),
    ],
)
def test_an_outage_is_told_from_what_no_waiting_mends(said: str, expected: bool):
    assert is_refused(OSError(said)) == expected
    assert is_refused(PermissionError("not yours"))


def test_a_file_of_a_store_that_is_away_is_no_wrong_input():
    class Away:
        def open_input_file(self, path: str) -> None:
            raise OSError(f"AWS Error NETWORK_CONNECTION during GetObject of {path}")

    class Refuses:
        def open_input_file(self, path: str) -> None:
            raise OSError(f"AWS Error ACCESS_DENIED during GetObject of {path}")

    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        read_json(Folder(Away(), "f"), "config.json")
    with pytest.raises(WrongInput, match=r"f/config.json cannot be read: AWS Error ACCESS_DENIED"):
        read_json(Folder(Refuses(), "f"), "config.json")
