"""Checkpoints of a script: published whole, verified, kept by Ray's rules."""

import json

import pytest

from workers.scripts.reports import SNAPSHOT, Reports, Retention, paths_in


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


def test_ray_s_own_result_reads_the_snapshot(tmp_path):
    from ray.train import Result

    reports = opened(tmp_path, Retention(2, "score"))
    for name, score in (("a", 9), ("b", 1), ("c", 5)):
        reported(tmp_path, reports, name, score=score)
    result = Result.from_path(str(tmp_path / "run"))
    assert result.metrics == {"score": 5}
    assert result.checkpoint is not None
    assert result.checkpoint.path.endswith("/c")
    assert result.best_checkpoints is not None
    assert {m["score"] for _, m in result.best_checkpoints} == {9, 1, 5}


def test_ranks_that_raise_in_one_call_are_one_failure(tmp_path):
    reports = opened(tmp_path)
    assert reports.add_failure(1, 0, "ValueError") == 1
    assert reports.add_failure(1, 2, "ValueError") == 1
    assert reports.add_failure(4, 1, "ValueError") == 2
    reports.forget_failures()
    assert reports.add_failure(7, 0, "ValueError") == 1


def test_every_report_has_a_line(tmp_path):
    reports = opened(tmp_path)
    reports.log({"report": 1, "metrics": {"loss": 2.0}, "checkpoint": None})
    (line,) = (tmp_path / "run/reports.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {"loss": 2.0}
    assert not (tmp_path / "run" / SNAPSHOT).exists()
