"""`elastic stop` where it cannot help: a run whose Ray is its driver's own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.app import main
from elastic.store.claim import this_machine
from elastic.store.files import open_folder, write_json


def stop(tmp_path: Path, capsys, **config: Any) -> str:
    write_json(open_folder(str(tmp_path)), "config.json", {"steps": 9, **config})
    assert main(["stop", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def driver(pid: int, machine: str) -> dict[str, Any]:
    return {"pid": pid, "host": "its\x1b[2Jhost", "machine": machine, "ray": "embedded"}


def gone() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("address", [None, "local"])
def test_what_stops_a_run_on_a_ray_of_its_own_is_said(tmp_path, capsys, address):
    pid, here = os.getpid(), this_machine()
    said = stop(tmp_path, capsys, address=address, driver=driver(pid, here))
    assert "runs on a Ray of its own, which nobody else reaches: " in said
    assert f"`kill {pid}` stops it as Ctrl-C at its driver does" in said
    said = stop(tmp_path, capsys, address=address, driver=driver(pid, "another"))
    assert f"`kill {pid}` on its\\x1b[2Jhost stops it" in said
    lost = gone()
    said = stop(tmp_path, capsys, address=address, driver=driver(lost, here))
    assert f"has ended with its driver (pid {lost}): the same `elastic run` resumes it" in said


@pytest.mark.parametrize("config", [{"address": "local"}, {"driver": {"ray": "embedded"}}])
def test_a_run_of_before_and_a_foreign_config_are_one_line_too(tmp_path, capsys, config):
    assert "press Ctrl-C at its `elastic run`, or send it SIGTERM" in stop(
        tmp_path, capsys, **config
    )
