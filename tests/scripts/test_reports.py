"""Checkpoints of a script: published whole, verified, kept by Ray's rules."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.store.remote import patiently
from workers.scripts.reporting import Told
from workers.scripts.reports import SNAPSHOT, Reports, Retention, checksum, paths_in
from workers.scripts.values import plain, returned


def reported(tmp_path, reports, name, content=b"weights", **metrics):
    source = tmp_path / "source"
    (source / "part").mkdir(parents=True, exist_ok=True)
    (source / "part" / "w.pt").write_bytes(content)
    reports.clear(name)
    files = reports.store(source, name, paths_in(source))
    reports.publish(name, files, metrics)


def opened(tmp_path, retention=None):
    place = tmp_path / "run"
    place.mkdir(exist_ok=True)
    return Reports(str(place), retention or Retention(), "2.60.0")


def names(reports):
    return [entry["checkpoint_dir_name"] for entry in reports.entries()]


def test_the_newest_is_what_was_reported_last(tmp_path):
    reports = opened(tmp_path)
    assert reports.newest() is None
    reported(tmp_path, reports, "checkpoint_a", loss=2.0)
    reported(tmp_path, reports, "checkpoint_b", b"others", loss=1.0)
    assert opened(tmp_path).newest() == "checkpoint_b"
    assert (tmp_path / "run/checkpoint_b/part/w.pt").read_bytes() == b"others"


def test_a_damaged_one_is_told_and_the_one_before_is_given(tmp_path, capsys):
    reports = opened(tmp_path)
    for name in ("checkpoint_a", "checkpoint_b"):
        reported(tmp_path, reports, name)
    (tmp_path / "run/checkpoint_b/part/w.pt").write_bytes(b"weightz")
    assert opened(tmp_path).newest() == "checkpoint_a"
    assert "checkpoint_b is damaged: part/w.pt is not what was reported" in capsys.readouterr().err


def test_a_missing_file_is_a_damage(tmp_path):
    reports = opened(tmp_path)
    reported(tmp_path, reports, "checkpoint_a")
    (tmp_path / "run/checkpoint_a/part/w.pt").unlink()
    assert opened(tmp_path).newest() is None


def test_what_is_not_published_counts_for_nothing_and_is_swept(tmp_path):
    reports = opened(tmp_path)
    reported(tmp_path, reports, "checkpoint_a")
    source = tmp_path / "source"
    reports.store(source, "checkpoint_b", paths_in(source))
    assert opened(tmp_path).newest() == "checkpoint_a"
    reports.sweep()
    assert not (tmp_path / "run/checkpoint_b").exists()
    assert (tmp_path / "run/checkpoint_a").exists()


def test_a_name_is_reported_once(tmp_path):
    reports = opened(tmp_path)
    reported(tmp_path, reports, "mine")
    with pytest.raises(ValueError, match="'mine' has been reported before"):
        reports.clear("mine")


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), ["a", "b", "c", "d"]),
        (Retention(1), ["c", "d"]),
        (Retention(1, "score"), ["a", "c", "d"]),
        (Retention(1, "score", "min"), ["b", "c", "d"]),
    ],
)
def test_the_best_stay_and_the_newest_two(tmp_path, retention, kept):
    reports = opened(tmp_path, retention)
    for name, score in (("a", 9), ("b", 1), ("c", 5), ("d", 4)):
        reported(tmp_path, reports, name, score=score)
    assert names(reports) == kept
    folders = {p.name for p in (tmp_path / "run").iterdir() if len(p.name) == 1}
    assert folders == set(kept)


def test_ranks_that_raise_in_one_call_are_one_failure_and_a_new_launch_counts_anew(tmp_path):
    reports = opened(tmp_path)
    assert reports.add_failure("ab", 1, 0, "ValueError") == 1
    assert reports.add_failure("ab", 1, 2, "ValueError") == 1
    assert reports.add_failure("ab", 4, 1, "ValueError") == 2
    assert reports.add_failure("cd", 7, 0, "ValueError") == 1


@pytest.mark.parametrize(
    "name", ["logs", "script", "../other", "a/b", "", ".", "..", "config.json"]
)
def test_a_checkpoint_takes_no_name_of_the_run_directory(tmp_path, name):
    reports = opened(tmp_path)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="must be the name of one folder"):
        reports.clear(name)
    assert (tmp_path / "run" / "logs").exists()
    assert (tmp_path / "other").exists()


def test_what_is_no_number_is_worse_than_any(tmp_path):
    reports = opened(tmp_path, Retention(1, "loss", "min"))
    losses = [3.0, float("nan"), 1.0, 0.5, 0.4, 9.0, 9.0]
    for i, loss in enumerate(losses):
        reported(tmp_path, reports, f"checkpoint_{i}", loss=loss)
    assert names(reports) == ["checkpoint_4", "checkpoint_5", "checkpoint_6"]
    manifests = sorted(path.name for path in (tmp_path / "run" / "script").iterdir())
    assert manifests == [f"{name}.json" for name in names(reports)]


def test_a_store_that_is_away_is_waited_for_and_damages_nothing(tmp_path, monkeypatch, capsys):
    reported(tmp_path, opened(tmp_path), "checkpoint_a")
    calls = []

    def away_once(folder, path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError("the store is away")
        return checksum(folder, path)

    monkeypatch.setattr("workers.scripts.reports.checksum", away_once)
    monkeypatch.setattr("workers.scripts.reports.patiently", partial(patiently, rest=calls.append))
    assert opened(tmp_path).newest() == "checkpoint_a"
    assert "damaged" not in capsys.readouterr().err


def test_what_a_function_returns_and_reports_is_json():
    assert returned({"a": [1]}) == b'{"a": [1]}'
    assert returned(object()) == b"null"
    found = plain({"f": np.float32(0.5), "t": torch.tensor(2), "a": np.arange(2), "p": Path("x")})
    assert found == {"f": 0.5, "t": 2, "a": "[0 1]", "p": "x"}


def test_every_report_has_a_line(tmp_path):
    reports = opened(tmp_path)
    reports.log({"report": 1, "metrics": {"loss": 2.0}, "checkpoint": None})
    (line,) = (tmp_path / "run/reports.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {"loss": 2.0}
    assert not (tmp_path / "run" / SNAPSHOT).exists()


def test_a_checkpoint_that_only_the_lost_rank_has_brought_is_missed_when_it_is_due():
    told = Told()
    reports = [(set(), True), ({0}, True), (set(), True), (set(), True), ({0}, True)]
    for bringing, is_fine in reports:
        assert told.count(bringing, {0, 1, 2}) is is_fine
    assert [told.count(set(), {1, 2}) for _ in range(3)] == [True, True, False]
    assert told.count({1}, {1, 2}), "another rank has taken over"
    assert told.count(set(), {1, 2})
