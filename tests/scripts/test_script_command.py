"""`elastic run SCRIPT.py`: how the script is run, and what is said of one that is none of ours."""

import sys
from pathlib import Path

import pytest
import ray

from elastic import ray_train
from elastic.cli.script import run_script, script_in
from elastic.driver.script_level import VARIABLE, may_go_on_in_place
from elastic.protocol.errors import WrongInput


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Of a source, with arguments; the exit status."""
    monkeypatch.setattr(sys, "argv", ["elastic"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(ray_train, "num_fits", 0)

    def script(source: str, *arguments: str, level: str | None = None) -> int:
        file = tmp_path / "train.py"
        file.write_text(source)
        return run_script(str(file), [*arguments], level)

    return script


FITS = "from elastic import ray_train\nray_train.count_fit()\n"


def test_a_script_without_a_fit_is_told_what_it_may_be(run):
    with pytest.raises(WrongInput, match=r"train\.py called no TorchTrainer\.fit\(\); .*torchrun`"):
        run("print('hello')\n")


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(WrongInput, match=r"there is no script .*none\.py"):
        run_script(str(tmp_path / "none.py"), [])


def test_it_is_run_as_python_would_run_it(run, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    source = "import sys, beside\nassert __name__ == '__main__'\nassert beside.VALUE == 7\n"
    source += "assert sys.argv[1:] == ['--lr', '0.1']\n"
    assert run(source + FITS, "--lr", "0.1") == 0


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
    ],
)
def test_its_exit_is_its_own(run, capsys, source, status, said):
    assert run(FITS + source) == status
    assert capsys.readouterr().err == said


def test_its_traceback_begins_in_the_script(run, capsys):
    assert run("def lose():\n    raise KeyError('mine')\nlose()\n") == 1
    files = [line for line in capsys.readouterr().err.splitlines() if "File" in line]
    assert [Path(line.split('"')[1]).name for line in files] == ["train.py", "train.py"]


def test_which_command_lines_name_a_script():
    assert script_in(["run", "train.py", "--lr", "1"]) == ("train.py", ["--lr", "1"], None)
    asked = ["train.py", "--script-level", "1"]  # behind it, it is the script's own
    assert script_in(["run", "--script-level", "0", *asked]) == ("train.py", asked[1:], "0")
    assert script_in(["run", "--script-level=1", *asked]) == ("train.py", asked[1:], "1")
    assert script_in(["run"]) is None
    assert script_in(["run", "train.py:Class"]) is None
    assert script_in(["status", "train.py"]) is None


@pytest.mark.parametrize("words", [[], ["0"], ["0", "train.py:Class"], ["train.py"]])
def test_a_level_needs_a_script(words):
    with pytest.raises(WrongInput, match="--script-level needs a level and a script: `elastic run"):
        script_in(["run", "--script-level", *words])


def test_the_level_of_a_command_counts_before_that_of_the_environment(run, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    source = "from elastic.driver.script_level import may_go_on_in_place\n"
    source += "assert not may_go_on_in_place()\n"
    assert run(source + FITS, level="0") == 0
    with pytest.raises(WrongInput, match="--script-level must be 0 or 1, got '2'"):
        run(FITS, level="2")
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(WrongInput, match="ELASTIC_SCRIPT_LEVEL must be 0 or 1, got 'x'"):
        may_go_on_in_place()
    monkeypatch.delenv(VARIABLE)
    assert may_go_on_in_place()


@pytest.mark.parametrize("version", ["2.61.0", "2.6.0", "3.0.0.dev0"])
def test_a_ray_that_is_not_known_is_refused_in_one_line(monkeypatch, version):
    monkeypatch.setattr(ray, "__version__", version)
    with pytest.raises(WrongInput, match=f"this is Ray {version}: install") as found:
        ray_train.install()
    assert "\n" not in str(found.value)
