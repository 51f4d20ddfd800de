"""A new job's folder: its test passes, its job file is one, and nothing is overwritten."""

import subprocess
import sys

import pytest

from elastic.cli.app import main
from elastic.cli.init import FILES
from elastic.cli.job_file import expanded


@pytest.fixture
def folder(tmp_path, capsys):
    assert main(["init", str(tmp_path / "my job")]) == 0
    assert "run it: elastic run " in capsys.readouterr().out
    return tmp_path / "my job"


def test_its_own_test_passes(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_its_job_file_names_its_class_and_its_own_storage(folder):
    words = expanded(["run", str(folder / "elastic.yaml")])
    assert words[1] == f"{folder / 'my_job.py'}:Job"
    assert words[words.index("--storage") + 1] == str(folder / "runs")


def test_a_folder_that_has_something_is_refused_and_left_alone(folder, capsys):
    (folder / "my_job.py").write_text("mine")
    assert main(["init", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (folder / "my_job.py").read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["init", str(tmp_path / "file" / "job")]) == 2
    assert "cannot be written" in capsys.readouterr().err
