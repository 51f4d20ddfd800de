"""A run directory that is left as it was found, where storage has no locks and cannot append."""

from pathlib import Path

import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.before import Before, look_at
from elastic.store.claim import CLAIMS
from elastic.store.files import PROBE, reach_folder
from elastic.store.journal import read_lines, segment_name
from elastic.store.run_directory import ROLLED_BACK, RunDirectory
from tests.store.test_claim import bucket


def come_to_nothing(path: Path) -> None:
    storage = bucket(path)
    before = look_at(storage.at("r"))
    run = RunDirectory(storage, "r", spool=path.parent / "spool", launch="first")
    run.begin({"steps": 9})
    run.append_journal({"n": 1})
    run.flush()
    run.undo(before)


def test_in_a_bucket_nothing_stays_of_a_run_that_came_to_nothing(tmp_path):
    come_to_nothing(tmp_path / "bucket")
    assert list((tmp_path / "bucket/runs").iterdir()) == []


def test_records_of_which_there_were_only_segments_stay(tmp_path):
    """Opening the run joins them into a file whose name was not there before."""
    run = bucket(tmp_path / "bucket").at("r")
    run.create()
    line = b'{"step":1}\n'
    for name in ("journal.jsonl", ROLLED_BACK):
        run.write(segment_name(name, 0), line)
        run.write(segment_name(name, len(line)), line)
    come_to_nothing(tmp_path / "bucket")
    assert read_lines(run, ROLLED_BACK) == [{"step": 1}] * 2
    assert read_lines(run, "journal.jsonl")[:2] == [{"step": 1}] * 2
    assert not run.exists("config.json")


def test_a_run_in_a_bucket_is_claimed_until_it_is_as_it_was(tmp_path, monkeypatch):
    put_back, was_refused = Before.put_back, list[bool]()

    def try_to_open(before: Before) -> None:
        put_back(before)
        with pytest.raises(WrongInput, match="live run"):
            RunDirectory(bucket(tmp_path / "bucket"), "r", spool=tmp_path / "b", launch="second")
        was_refused.append(True)

    monkeypatch.setattr(Before, "put_back", try_to_open)
    come_to_nothing(tmp_path / "bucket")
    assert was_refused == [True]


def test_the_wish_of_another_launch_outlives_a_run_that_came_to_nothing(tmp_path, monkeypatch):
    claims = bucket(tmp_path / "bucket").at("r").at(CLAIMS)
    wish = "000009-0123abcd-second"
    monkeypatch.setattr(Before, "put_back", lambda _: claims.write(wish, b"{}"))
    come_to_nothing(tmp_path / "bucket")
    assert claims.names() == [wish]


def test_probes_of_workers_that_were_starting_do_not_keep_a_run_that_came_to_nothing(
    tmp_path, monkeypatch
):
    """One that was ended in between, and one that writes its probe when all is put back."""
    folder = tmp_path / "runs/r"
    before = look_at(reach_folder(str(tmp_path / "runs")).at("r"))
    run = RunDirectory(str(tmp_path / "runs"), "r", launch="first")
    run.begin({"steps": 9})
    (folder / f"{PROBE}0").touch()
    put_back = Before.put_back

    def late(before: Before) -> None:
        put_back(before)
        assert not (folder / f"{PROBE}0").exists()
        (folder / f".{PROBE}1.0123").touch()

    monkeypatch.setattr(Before, "put_back", late)
    run.undo(before)
    assert not folder.exists()


def test_what_others_put_there_keeps_the_folder(tmp_path):
    before = look_at(reach_folder(str(tmp_path / "runs")).at("r"))
    run = RunDirectory(str(tmp_path / "runs"), "r", launch="first")
    run.begin({"steps": 9})
    (run.directory / "notes.txt").touch()
    run.undo(before)
    assert [path.name for path in run.directory.iterdir()] == ["notes.txt"]
