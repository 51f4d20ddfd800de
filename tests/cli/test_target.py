"""TARGET and --set: from a text to a workload, or one line that says why not."""

import sys
from pathlib import Path

import pytest

import elastic
from elastic.driver.target import Target, load_target, parse_arguments, target_of
from elastic.protocol.errors import WrongInput

WORKLOAD = """
import elastic

class Job(elastic.Workload):
    def __init__(self, width=4, *, name="x"):
        if width < 0:
            raise ValueError("width is negative")
        self.width, self.name = width, name
    def build_model(self): ...
    def build_optimizer(self, params): ...
    def dataset(self): ...
    def loss(self, model, batch): ...

class Lossless(elastic.Workload):
    def build_model(self): ...
    def build_optimizer(self, params): ...
    def dataset(self): ...

class Other: ...
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs, left out of sys.path and sys.modules again afterwards."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "jobs_of_test.py").write_text(WORKLOAD)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def refusal(text: str, place: Path, **arguments: object) -> str:
    with pytest.raises(WrongInput) as caught:
        load_target(text, arguments, current=place)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_gives_its_workload_its_folder_and_its_import_name(place):
    target = load_target("jobs_of_test.py:Job", {"width": 8}, current=place)
    file = place.resolve() / "jobs_of_test.py"
    named = ("jobs_of_test:Job", place.resolve(), "jobs_of_test", file)
    assert target == Target(target.workload, *named)
    assert (target.workload.width, target.workload.name) == (8, "x")
    assert sys.path[0] == str(place.resolve())
    assert sys.modules["jobs_of_test"].Job is type(target.workload)


def test_a_file_inside_a_package_is_imported_as_its_module(place):
    package = place / "package_of_test" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "jobs.py").write_text("from . import other\n" + WORKLOAD)
    (package / "other.py").touch()
    target = load_target(str(package / "jobs.py") + ":Job", {}, current=place / "elsewhere")
    assert (target.folder, target.module) == (place.resolve(), "package_of_test.inner.jobs")
    assert target.spelled == "package_of_test.inner.jobs:Job"
    assert target.source == (package / "jobs.py").resolve()


def test_a_module_is_found_in_the_current_folder(place):
    target = load_target("jobs_of_test:Job", {}, current=place)
    assert (target.spelled, target.folder) == ("jobs_of_test:Job", place.resolve())


def test_a_shipped_workload_needs_no_folder_on_any_node():
    from workers.workloads.digits import Digits

    target = target_of(Digits())
    assert (target.spelled, target.folder, target.module) == (
        "workers.workloads.digits:Digits",
        None,
        "workers.workloads.digits",
    )


def test_a_class_made_in_a_function_goes_by_value():
    class Local(elastic.Workload):
        def build_model(self): ...
        def build_optimizer(self, params): ...
        def dataset(self): ...
        def loss(self, model, batch): ...

    assert target_of(Local()).module is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobs_of_test.py", "names no class"),
        ("jobs_of_test.py:", "names no class"),
        (":Job", "names no class"),
        ("missing.py:Job", "there is no file"),
        ("no_such_module:Job", "there is no module 'no_such_module'"),
        ("no_such.module:Job", "there is no module 'no_such.module'"),
        ("jobs_of_test.py:Nope", "has no class Nope; it has Job, Lossless"),
        ("jobs_of_test.py:Other", "is no workload: write `class Name(elastic.Workload)`"),
        ("jobs_of_test.py:Lossless", "has no method 'loss'"),
    ],
)
def test_a_target_that_cannot_be_found_is_one_line(place, text, says):
    assert says in refusal(text, place)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import numpy_of_another_world", "No module named 'numpy_of_another_world'"),
        ("x = 1 / 0", "bad_of_test.py:1: ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise BaseException('module says no')", "bad_of_test.py:1: BaseException: module says"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()",
            "bad_of_test.py:4: SystemExit: 2",
        ),
        ("import json\njson.loads('{')", "bad_of_test.py:2: JSONDecodeError: Expecting property"),
        (
            "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
            "bad_of_test.py:3: E: (its text cannot be had, str() of it raised RuntimeError)",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(place, source, says):
    (place / "bad_of_test.py").write_text(source)
    assert says in refusal("bad_of_test.py:Job", place)


def test_an_interrupt_while_a_module_is_imported_or_a_class_constructed_stays_one(place):
    (place / "bad_of_test.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_target("bad_of_test.py:Job", {}, current=place)


def test_a_constructor_that_exits_is_one_line_with_the_users_own_line(place):
    (place / "exits_of_test.py").write_text(
        WORKLOAD + "class Exits(Job):\n    def __init__(self):\n        exit('no licence')\n"
    )
    message = refusal("exits_of_test.py:Exits", place)
    assert "constructing Exits failed at " in message
    assert "exits_of_test.py:22: SystemExit: no licence" in message


def test_a_file_whose_name_another_module_has_is_refused(place):
    (place / "json.py").write_text(WORKLOAD)
    assert "'json' belongs to another module" in refusal("json.py:Job", place)


@pytest.mark.parametrize("name", ["workers.py", "elastic.py", "workers/__init__.py"])
def test_a_module_beside_the_target_that_shadows_ours_is_refused(place, name):
    path = place / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert "shadows our package" in refusal("jobs_of_test.py:Job", place)


def test_a_plain_folder_named_workers_shadows_nothing(place):
    (place / "workers").mkdir()
    assert load_target("jobs_of_test.py:Job", {}, current=place).module == "jobs_of_test"


def test_arguments_that_the_constructor_does_not_take_are_one_line(place):
    message = refusal("jobs_of_test.py:Job", place, widht=3)
    assert "'widht'" in message
    assert "it takes width=4, name='x'" in message


def test_a_constructor_that_raises_is_one_line_with_its_place(place):
    message = refusal("jobs_of_test.py:Job", place, width=-1)
    assert "jobs_of_test.py:7: ValueError: width is negative" in message


def test_set_values_are_python_literals_or_else_strings():
    settings = ["a=1", "b=1e-3", "c=(1, 2)", "d=None", "e=adam w", "f=x=y", "g='3'", "h="]
    assert parse_arguments(settings) == {
        "a": 1, "b": 1e-3, "c": (1, 2), "d": None, "e": "adam w", "f": "x=y", "g": "3", "h": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [(["width"], "no key=value"), (["=3"], "no key=value"), (["a=1", "a=2"], "given twice")],
)
def test_set_without_a_key_or_a_value_is_one_line(settings, says):
    with pytest.raises(WrongInput, match=says):
        parse_arguments(settings)
