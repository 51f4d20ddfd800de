"""`elastic scale` where it cannot: one line, exit status 2."""

import os
from typing import Any

import pytest

from elastic.cli.app import main
from elastic.store.claim import this_machine
from elastic.store.files import open_folder, write_json

EMBEDDED = {"pid": os.getpid(), "host": "h", "machine": this_machine(), "ray": "embedded"}
ENDED = {"outcome": "stopped", "steps": 3}


def refused(capsys, *words: str) -> str:
    assert main(["scale", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def run_dir(tmp_path):
    """run_dir(result, **config) -> its path."""

    def make(result: dict[str, Any] | None = None, **config: Any) -> str:
        folder = open_folder(str(tmp_path))
        write_json(folder, "config.json", {"steps": 9, **config})
        if result is not None:
            write_json(folder, "result.json", result)
        return str(tmp_path)

    return make


def test_what_cannot_be_resized_is_one_line(run_dir, capsys, tmp_path):
    assert "is no run directory" in refused(capsys, str(tmp_path / "none"), "2")
    said = refused(capsys, run_dir(driver=EMBEDDED), "2..3")
    assert "runs on a Ray of its own" in said
    assert "start it again with --workers 2..3" in said
    assert "WORKERS 'many': give a number or MIN..MAX" in refused(capsys, run_dir(), "many")
    assert "has only begun; try again" in refused(capsys, run_dir(address="127.0.0.1:9"), "2")
    said = refused(capsys, run_dir(ENDED), "2..3")
    assert "has ended: stopped after 3 steps; to go on with it, start it again with" in said
