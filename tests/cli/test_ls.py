"""`elastic ls`: a run is one line, whatever its files or its name hold."""

import json
import os
from pathlib import Path

from elastic.cli.app import main
from elastic.observe.runs import Listed, runs_in
from elastic.store.files import open_folder
from tests.object_store import FaultProxy, S3Server, uri

CONFIG = {"steps": 100, "detect_s": 10.0}
STATUS = {"phase": "running", "step": 40, "controller": {}}
NOW = 1_800_000_000.0


def make_run(storage: Path, name: str, at: float, **files: object) -> None:
    folder = storage / name
    folder.mkdir(parents=True)
    for file, content in {"config": CONFIG, **files}.items():
        path = folder / f"{file}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        os.utime(path, (at, at))


def make_runs(storage: Path) -> None:
    make_run(storage, "live", NOW - 1, status=STATUS)
    make_run(storage, "ended", NOW - 50, status=STATUS, result={"outcome": "failed", "steps": 60})
    make_run(storage, "silent", NOW - 500, status=STATUS)
    make_run(storage, "begun", NOW - 600)
    make_run(storage, "broken", NOW - 700, status="{")
    checkpoint = storage / "ended" / "checkpoints" / "step-00000060"
    checkpoint.mkdir(parents=True)
    (checkpoint / "part").write_bytes(b"x" * 1000)
    os.utime(checkpoint / "part", (NOW - 40, NOW - 40))
    (storage / "no-run").mkdir()


def test_the_newest_comes_first_and_sizes_are_of_all_that_is_there(tmp_path: Path):
    make_runs(tmp_path)
    found = runs_in(open_folder(str(tmp_path)), now=NOW)
    assert [(run.name, run.state, run.step, run.changed_at) for run in found] == [
        ("live", "running", 40, NOW - 1),
        ("ended", "failed", 60, NOW - 40),
        ("silent", "silent", 40, NOW - 500),
        ("begun", "silent", 0, NOW - 600),
        ("broken", "damaged", 0, NOW - 700),
    ]
    small = len(json.dumps(CONFIG)) + len(json.dumps(STATUS))
    assert found[0] == Listed("live", "running", 40, 100, NOW - 1, small)
    assert found[1].size_bytes > 1000


def test_it_is_a_table_for_a_person_and_json_for_a_program(tmp_path: Path, capsys):
    make_runs(tmp_path)
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert {run["name"] for run in json.loads(capsys.readouterr().out)} == {
        *("live", "ended", "silent", "begun", "broken")
    }


def test_names_do_not_drive_the_terminal(tmp_path: Path, capsys):
    make_run(tmp_path, "\x1b[31m[red]", NOW)
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[31m[red]" in out


def test_what_is_no_storage_is_one_line(tmp_path: Path, capsys):
    assert main(["ls", str(tmp_path / "absent")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no run in ")


def test_runs_in_a_bucket_are_listed_too(s3: FaultProxy, s3_server: S3Server):
    place = open_folder(uri(s3_server.new_bucket(), "runs", s3.port))
    place.at("first").write("config.json", json.dumps(CONFIG).encode())
    place.at("first").at("logs").write("w0.log", b"x" * 300)
    (run,) = runs_in(place)
    assert (run.name, run.state, run.steps) == ("first", "starting", 100)
    assert run.size_bytes == 300 + len(json.dumps(CONFIG))
