"""Job files: what options they become, and what is refused with the nearest key."""

import inspect
import itertools
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from elastic.cli.app import main
from elastic.cli.job_file import OPTIONS, SECTIONS, expanded, schema
from elastic.cli.run import run
from elastic.cli.run_options import parse_keep
from elastic.cli.submit import own_options
from elastic.config import keywords
from elastic.protocol.errors import WrongInput

JOB = {
    "resources": {"workers": "2..4", "standby": 1},
    "run": {
        "target": "job.py:Job",
        "arguments": {"width": 3, "label": "a b"},
        "steps": 10,
        "global_batch": 32,
        "micro_batch": 8,
        "offload": False,
        "activation_checkpointing": True,
    },
    "storage": {"place": "runs", "name": None},
    "elastic": {"detect_s": "none", "faults": {"verify_every": 5}},
}


@pytest.fixture
def job(tmp_path):
    """job(content) -> the path of a file that has it."""

    def write(content: object) -> Path:
        path = tmp_path / "elastic.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


def test_a_job_becomes_the_options_of_run_and_the_command_line_prevails(job, tmp_path):
    words = expanded(["run", str(job(JOB)), "--steps", "20", "--set", "width=4"])
    assert words[:2] == ["run", f"{tmp_path}/job.py:Job"]
    assert words[-4:] == ["--steps", "20", "--set", "width=4"]
    pairs = list(itertools.pairwise(words))
    wanted = [("--workers", "2..4"), ("--standby", "1"), ("--set", "label='a b'")]
    wanted += [("--storage", f"{tmp_path}/runs"), ("--detect-s", "none")]
    wanted += [("--faults", "verify_every=5"), ("--steps", "10")]
    assert [pair for pair in wanted if pair not in pairs] == []
    assert "--activation-checkpointing" in words
    assert not {"--offload", "--name"} & set(words)
    assert ("--set", "width=3") not in pairs


def test_other_command_lines_are_left_alone():
    for words in (["run", "job.py:Job"], ["status", "runs/elastic.yaml"], ["run"], []):
        assert expanded(words) == words


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**JOB, "resource": {}}, "elastic.yaml: resource is unknown: do you mean resources?"),
        ({"run": {"target": "a:B", "step": 3}}, "run.step is unknown: do you mean steps?"),
        ({"run": {"target": "a:B", "xyzzy": 3}}, "run.xyzzy is unknown: choose from target, "),
        ({"run": {"target": "a:B", "steps": "many"}}, "run.steps must be integer, got 'many'"),
        ({"run": {"target": "a:B", "steps": True}}, "run.steps must be integer, got True"),
        ({"run": {"steps": 3}}, "run.target is missing"),
        ({"run": [1]}, "elastic.yaml: run must be a mapping of target, "),
        ([], "elastic.yaml must be a mapping of resources, setup, run, storage, elastic"),
        ("run: {target: a:B", "cannot be read: line 1: "),
        ("a: \x00", "cannot be read: "),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(job, capsys, content, said):
    assert main(["run", str(job(content))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: ")
    assert said in line


def test_a_job_file_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["run", str(tmp_path / "elastic.yml")]) == 2
    assert "elastic.yml cannot be read: " in capsys.readouterr().err


def test_what_the_file_says_is_checked_as_options_are(job, capsys):
    values = {**JOB["run"], "global_batch": 33}
    assert main(["run", str(job({**JOB, "run": values}))]) == 2
    assert "global_batch=33 is not a multiple of micro_batch=8" in capsys.readouterr().err


def test_every_option_of_run_has_a_key_and_every_key_an_option():
    keys = [OPTIONS.get(key, key).lstrip("-") for kinds in SECTIONS.values() for key in kinds]
    others = {"settings", "detach", "as_json"}
    parameters = {*inspect.signature(run).parameters, *inspect.signature(own_options).parameters}
    assert sorted(keys) == sorted((parameters | {"set"}) - others), (
        "a new option of `elastic run` or `elastic submit` needs its key in SECTIONS"
    )


def test_the_schema_for_editors_is_that_of_the_sections():
    shipped = Path(inspect.getfile(run)).with_name("job.schema.json")
    assert json.loads(shipped.read_text()) == schema()
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(JOB, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"run": {"step": 3}}, schema())


def test_every_field_of_a_run_can_be_set_in_a_job_file_and_on_the_command_line():
    parameters = inspect.signature(run).parameters
    places = {"place": "storage"}
    keys = {places.get(key, key) for section in SECTIONS.values() for key in section}
    assert set(keywords()) - parameters.keys() == set()
    assert set(keywords()) - keys == set()


@pytest.mark.parametrize(("text", "kept"), [("3", (3, None)), ("2,1000", (2, 1000))])
def test_what_is_kept_of_checkpoints_is_an_option(text, kept):
    assert parse_keep(text) == kept
    with pytest.raises(WrongInput, match="give a number or LAST,EVERY"):
        parse_keep(f"{text},x")


def test_a_target_that_names_nothing_is_told_before_options_are_missed(capsys):
    for words in (["run", "job.yamll"], ["run", "job", "--steps", "3"], ["submit", "job.py"]):
        assert main(words) == 2
        assert "names no class and no job file" in capsys.readouterr().err
