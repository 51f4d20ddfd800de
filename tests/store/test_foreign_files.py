"""What others may have put into a run directory: each is one line, none takes time or memory."""

import hashlib
import json

import pytest

from elastic.cli.app import main
from elastic.driver.resume import compare, read_past_run
from elastic.protocol.encoding import UndecodableValue, from_ranges, loads, registry
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import MANIFEST, decode
from elastic.store.catalogue import Catalogue
from elastic.store.files import open_folder
from elastic.store.journal import read_records
from tests.store.saves import save

STATUS = {
    "phase": "running",
    "generation": 1,
    "world_size": 0,
    "step": 3,
    "steps": 9,
    "committed_checkpoint": None,
    "workers": [],
    "standby": [],
    "controller": {},
    "reason": "",
}


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.json").write_text('{"steps":9}')
    return tmp_path


def one_line(capsys, *command: str) -> str:
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("workers", [3]), ("workers", None), ("phase", 4), ("steps", "9"), ("controller", [])],
)
def test_a_status_that_is_none_is_one_line(run_dir, capsys, name, value):
    (run_dir / "status.json").write_text(json.dumps({**STATUS, name: value}))
    assert "status.json is damaged" in one_line(capsys, "status", str(run_dir))


def test_what_others_wrote_does_not_drive_the_terminal(run_dir, capsys):
    (run_dir / "status.json").write_text(json.dumps({**STATUS, "reason": "\x1b[2Jgone [/b]"}))
    assert main(["status", str(run_dir)]) == 0
    assert "reason: \\x1b[2Jgone [/b]" in capsys.readouterr().out
    (run_dir / "metrics.jsonl").write_bytes(b'{"step":1}\n\x1b[2J\n{"step":2}\n')
    (run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000001" / MANIFEST).touch()
    assert "metrics.jsonl line 2 is damaged" in one_line(capsys, "checkpoint", "best", str(run_dir))
    assert "\x1b" not in one_line(capsys, "status", str(run_dir / "\x1b[2J"))


@pytest.mark.parametrize("line", ['{"step":"1"}', '{"stop":1}', '{"step":1,"user":[]}'])
def test_a_line_that_lacks_a_field_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"user":{}}\n' + line + "\n")
    with pytest.raises(WrongInput, match=r"metrics.jsonl line 2 is damaged: it has no sound '"):
        read_records(open_folder(str(tmp_path)), "metrics.jsonl", {"step": int, "user": dict})


def sealed(content: str) -> bytes:
    """A manifest's JSON with the checksum that it then has."""
    text = content[: content.rindex(',"sha256":"')]
    return f'{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"shape":[5]', '"shape":[1099511627776]', "is longer than"),
        ('"shape":[5]', '"shape":[5.0]', "is no count"),
        ('"start":[0]', '"start":[1]', "lies outside of it"),
        ('"dtype":"int64"', '"dtype":"int640"', "is of no dtype"),
        ('"name":"optimizer/step"', '"name":"model/a"', "twice"),
        ('"step":7', '"step":"7"', "is no count"),
    ],
)
def test_a_manifest_that_promises_more_than_there_is_is_damaged(tmp_path, old, new, complaint):
    made = Catalogue(open_folder(str(tmp_path)))
    save(made, 7, seed=1, world_size=1)
    folder = made.of_step(7)
    text = folder.read(MANIFEST).decode()
    assert old in text
    folder.write(MANIFEST, sealed(text.replace(old, new)))
    with pytest.raises(DamagedCheckpoint, match=complaint):
        made.manifest(7)


def test_json_that_is_nested_too_deeply_is_damage(tmp_path):
    deep = b"[" * 100_000
    (tmp_path / "config.json").write_bytes(deep)
    with pytest.raises(WrongInput, match=r"config.json is damaged"):
        read_past_run(open_folder(str(tmp_path)))
    with pytest.raises(DamagedCheckpoint, match="no JSON"):
        decode(deep, "m")


@pytest.mark.parametrize("pairs", [[[0, 2**40]], [[-3, 4]], [[5, 4]], [[0, 4], [4, 9]]])
def test_a_set_of_numbers_that_none_of_ours_is_takes_no_memory(pairs):
    with pytest.raises(ValueError, match="a range of numbers"):
        from_ranges(pairs)
    with pytest.raises(UndecodableValue):
        loads(json.dumps({"type": "NumberSet", "ranges": pairs}), registry())


def test_a_result_that_is_none_is_refused_before_anything_is_made_of_it(run_dir, capsys):
    (run_dir / "result.json").write_text('{"outcome":"succeeded","steps":9}')
    assert "result.json is damaged" in one_line(capsys, "watch", str(run_dir))
    past = read_past_run(open_folder(str(run_dir)))
    with pytest.raises(WrongInput, match=r"result.json is damaged"):
        compare("here", past, {"steps": 9})
