"""The examples of the pages are what the code takes. What starts Ray is in tests/cluster."""

import contextlib
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.exceptions import Exit
from typer.main import get_command

import elastic
from elastic.chaos.plan import make_plan
from elastic.chaos.scenario import WHATS, read_scenario, shipped_names
from elastic.cli.app import app
from elastic.cli.experiment import check_options
from elastic.experiment.sweep import read_sweep
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, named

CLUSTERS = ROOT / "cluster_configs/README.md"
WITH_COMMANDS = [page for page in [*PAGES, CLUSTERS] if page != DOCS / "cli.md"]


def commands_in(page: Path) -> list[str]:
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:^|-- +)(elastic .*)", line) for line in lines]
    return [match[1] for match in found if match]


def parse(words: list[str]) -> None:
    """As `elastic` would, without doing it. Raises what typer raises."""
    command, name = get_command(app), "elastic"
    while hasattr(command, "commands"):
        context = command.context_class(command, info_name=name)
        name, command, words = command.resolve_command(context, words)
        assert command is not None
    command.make_context(name, list(words))


@pytest.mark.parametrize("page", [p for p in WITH_COMMANDS if commands_in(p)], ids=named)
def test_commands_are_understood(page: Path):
    for line in commands_in(page):
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "run" and words[1].endswith(".yaml"):  # it has what must be given
            words[1:2] = [*("job.py:Job", "--steps", "1"), *("--global-batch", "1")]
            words += ["--micro-batch", "1"]
        with contextlib.suppress(Exit):  # of --version and --help
            parse(words)


def test_a_wrong_command_is_found():
    with pytest.raises(Exception, match="No such option"):
        parse(["status", "runs/first", "--nowhere"])
    with pytest.raises(Exception, match="No such command"):
        parse(["nowhere"])


def test_the_scenario_is_one(tmp_path: Path):
    text, _ = blocks(DOCS / "chaos.md", "yaml")
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    scenario = read_scenario(str(path))
    assert {f.what for f in scenario.faults} == set(WHATS)
    assert len(make_plan(scenario, num_workers=4)) > len(scenario.faults)
    shown = " ".join(line for line in commands_in(DOCS / "chaos.md"))
    assert any(name in shown for name in shipped_names())


def test_the_sweep_is_one(tmp_path: Path):
    scenario, sweep = blocks(DOCS / "chaos.md", "yaml")
    (tmp_path / "mine.yaml").write_text(scenario)
    (tmp_path / "elastic.yaml").write_text("run: {target: 'job.py:Job'}")
    (tmp_path / "sweep.yaml").write_text(sweep)
    found = read_sweep(tmp_path / "sweep.yaml")
    check_options(found, "sweep.yaml")
    assert len(found.points) == 3 * 5 * 2


def test_the_parquet_source_is_one(tmp_path: Path):
    (code,) = blocks(DOCS / "data.md", "python")
    pq.write_table(pa.table({"text": ["some words", "more"]}), tmp_path / "text.parquet")
    names = {"elastic": elastic, "tokenize": lambda text: [ord(c) for c in text]}
    place = str(tmp_path / "text.parquet")
    exec(code.replace("s3://bucket/text", place), names)
    source = names["dataset"](None)
    assert type(source) is type(elastic.data.parquet(place))
