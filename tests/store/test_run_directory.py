"""The run directory: one line per committed step, through crashes and roll backs."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.fs as arrow_fs
import pytest

from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, read_json
from elastic.store.journal import read_lines
from elastic.store.run_directory import RunDirectory, check_result

RESULT = {
    "outcome": "succeeded", "steps": 3, "loss": 0.5, "weights_sha256": "ab", "generations": 1,
    "lost_steps": 0, "goodput": 1.0, "badput": {}, "recoveries": [],
}  # fmt: skip
STATUS = {
    "layout": "", "wanted": [1, 2],
    "phase": "running", "generation": 1, "world_size": 1, "step": 0, "steps": 3,
    "committed_checkpoint": None, "workers": [], "standby": [], "controller": {}, "reason": "",
}  # fmt: skip


def metrics(step: int, *, attempt: int = 0) -> dict[str, Any]:
    return {
        "step": step, "time": float(attempt), "loss": 0.5, "generation": 1, "world_size": 2,
        "samples": 8 * step, "step_s": 0.1, "applied": True, "user": {},
    }  # fmt: skip


def samples(step: int) -> dict[str, Any]:
    return {"step": step, "first": 8 * (step - 1), "count": 8, "sha256": "ab"}


def record(run: RunDirectory, steps: range, *, attempt: int = 0) -> None:
    for step in steps:
        assert run.record_step(metrics(step, attempt=attempt), samples(step))


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path), "r")


def test_every_committed_step_is_one_line_in_both_files(run, tmp_path):
    record(run, range(1, 4))
    assert read_lines(run.folder, "metrics.jsonl") == [metrics(s) for s in (1, 2, 3)]
    assert read_lines(run.folder, "samples.jsonl") == [samples(s) for s in (1, 2, 3)]
    assert (run.last_step, run.place) == (3, str(tmp_path / "r"))


def test_a_step_that_is_said_twice_is_recorded_once(run):
    record(run, range(1, 3))
    assert not run.record_step(metrics(2, attempt=1), samples(2))
    assert read_lines(run.folder, "metrics.jsonl") == [metrics(1), metrics(2)]


class Full(io.FileIO):
    """A file on a disk without room."""

    is_full = True

    def write(self, content) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_step_is_safe_only_once_its_lines_are_written(run):
    record(run, range(1, 4))
    run._metrics._file = disk = Full(run._metrics.path, "ab")
    for step in (4, 5):
        with pytest.raises(OSError, match="No space left"):
            run.record_step(metrics(step), samples(step))
    assert (run.last_step, run.safe_step) == (5, 3)
    disk.is_full = False
    record(run, range(6, 7))
    assert (run.safe_step, steps_in(run.directory / "metrics.jsonl")) == (6, [1, 2, 3, 4, 5, 6])


def test_a_gap_is_refused(run):
    record(run, range(1, 3))
    with pytest.raises(ValueError, match="step 4 cannot follow step 2"):
        run.record_step(metrics(4), samples(4))


def test_a_field_that_the_contract_does_not_name_is_refused(run):
    with pytest.raises(AssertionError, match=r"\['color'\]"):
        run.record_step({**metrics(1), "color": 3}, samples(1))
    with pytest.raises(AssertionError, match=r"\['phase'\]"):
        run.write_status({k: v for k, v in STATUS.items() if k != "phase"})


def test_a_loss_that_is_not_finite_is_null(run):
    run.record_step({**metrics(1), "loss": float("nan"), "applied": False}, samples(1))
    line = (run.directory / "metrics.jsonl").read_text()
    assert '"loss":null' in line
    assert "NaN" not in line


def test_roll_back_moves_later_metrics_aside_and_says_how_many(run):
    record(run, range(1, 6))
    assert run.roll_back(2) == 3
    record(run, range(3, 5), attempt=1)
    assert run.roll_back(3) == 1
    assert run.roll_back(3) == 0
    record(run, range(4, 5), attempt=2)
    folder = run.folder
    assert read_lines(folder, "metrics.jsonl") == [
        metrics(1), metrics(2), metrics(3, attempt=1), metrics(4, attempt=2),
    ]  # fmt: skip
    assert read_lines(folder, "metrics.rolledback.jsonl") == [
        metrics(3), metrics(4), metrics(5), metrics(4, attempt=1),
    ]  # fmt: skip
    assert steps_in(run.directory / "samples.jsonl") == [1, 2, 3, 4]


def test_a_run_that_restarts_at_zero_keeps_no_line(run):
    record(run, range(1, 3))
    assert run.roll_back(0) == 2
    assert [(run.directory / n).read_bytes() for n in ("metrics.jsonl", "samples.jsonl")] == [
        b""
    ] * 2


def test_a_run_without_roll_back_has_no_file_for_it(run):
    record(run, range(1, 3))
    run.close()
    names = ["anatomy.jsonl", "journal.jsonl", "metrics.jsonl", "samples.jsonl"]
    assert run.folder.names() == names


def test_opening_again_finds_the_last_step_and_levels_both_files(run, tmp_path):
    record(run, range(1, 5))
    with (run.directory / "samples.jsonl").open("ab") as file:
        file.write(json.dumps(samples(5)).encode() + b"\n")  # killed before the metrics line
    with (run.directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "ti')
    again = RunDirectory(str(tmp_path), "r")
    assert again.last_step == 4
    record(again, range(5, 7))
    assert steps_in(again.directory / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert steps_in(again.directory / "samples.jsonl") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_record_that_ends_with_a_foreign_line_is_not_gone_on_from(run, tmp_path, name):
    record(run, range(1, 3))
    with (run.directory / name).open("ab") as file:
        file.write(b'{"name": "not ours"}\n')
    with pytest.raises(WrongInput, match=rf"{name} has a damaged line: .*not ours"):
        RunDirectory(str(tmp_path), "r")


def test_a_roll_back_that_was_killed_half_way_is_finished_when_the_run_is_opened(run, tmp_path):
    record(run, range(1, 6))
    kept = (run.directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run.directory / "metrics.rolledback.jsonl").write_bytes(b"".join(kept[3:]))
    again = RunDirectory(str(tmp_path), "r")
    assert again.last_step == 3
    assert steps_in(again.directory / "metrics.jsonl") == [1, 2, 3]
    assert steps_in(again.directory / "samples.jsonl") == [1, 2, 3]
    assert steps_in(again.directory / "metrics.rolledback.jsonl") == [4, 5]


def test_a_checkpoint_newer_than_the_record_is_gone_on_from_and_the_missing_steps_are_told(
    run, tmp_path
):
    record(run, range(1, 4))
    again = RunDirectory(str(tmp_path), "r")
    assert again.skip_to(3) is None
    assert again.skip_to(5) == (4, 5)
    assert (again.last_step, again.safe_step) == (5, 5)
    record(again, range(6, 8))
    assert again.roll_back(6) == 1
    assert steps_in(again.directory / "metrics.jsonl") == [1, 2, 3, 6]
    assert steps_in(again.directory / "samples.jsonl") == [1, 2, 3, 6]
    assert RunDirectory(str(tmp_path), "r").last_step == 6


def test_beginning_a_run_again_takes_its_old_result_away(run):
    run.write_result(RESULT)
    run.begin({"steps": 6})
    assert read_json(run.folder, "result.json") is None
    assert read_json(run.folder, "config.json") == {"steps": 6}


def test_status_is_replaced_at_once_where_storage_is_local(run):
    run.write_status(STATUS)
    run.write_status({**STATUS, "step": 2})
    assert read_json(run.folder, "status.json") == {**STATUS, "step": 2}


def test_of_a_script_status_and_result_have_a_level(run):
    level = {"level": 0, "level_reason": "why"}
    run.write_status({**STATUS, **level})
    run.write_result({**RESULT, **level})
    check_result({**RESULT, **level}, "result.json")
    for damaged in ({"level": "0", "level_reason": ""}, {"level": 0}, {**level, "other": 1}):
        with pytest.raises(WrongInput):
            check_result({**RESULT, **damaged}, "result.json")


def test_storage_that_cannot_be_created_is_wrong_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongInput, match="cannot be created"):
        RunDirectory(str(tmp_path / "file"), "r")


def test_storage_that_cannot_append_gets_segments_then_whole_files(tmp_path):
    (tmp_path / "bucket").mkdir()
    remote = Folder(
        arrow_fs.SubTreeFileSystem(str(tmp_path / "bucket"), arrow_fs.LocalFileSystem()), "runs"
    )
    run = RunDirectory(remote, "r", spool=tmp_path / "spool")
    record(run, range(1, 4))
    run.append_journal({"event": "Tick"})
    run.write_status(STATUS)
    (run.logs / "w0.log").write_text("hello\n")
    run.flush()
    assert run.place == "runs/r"
    assert run.safe_step == 3
    record(run, range(4, 5))
    assert run.safe_step == 3
    run.sync()
    assert run.safe_step == 4
    assert [m["step"] for m in read_lines(run.folder, "metrics.jsonl")] == [1, 2, 3, 4]
    assert run.roll_back(3) == 1
    assert [m["step"] for m in read_lines(run.folder, "metrics.jsonl")] == [1, 2, 3]
    assert read_json(run.folder, "status.json") == STATUS
    assert run.roll_back(1) == 2
    run.close()
    assert run.folder.names() == [
        "anatomy.jsonl", "journal.jsonl", "metrics.jsonl", "metrics.rolledback.jsonl",
        "samples.jsonl", "status.json",
    ]  # fmt: skip
    again = RunDirectory(remote, "r", spool=tmp_path / "another machine")
    assert again.last_step == 1
    again.close()
    moved = [metrics(4), metrics(2), metrics(3)]
    assert read_lines(run.folder, "metrics.rolledback.jsonl") == moved
    assert run.folder.at("logs").read("w0.log") == b"hello\n"
