"""The pages that come from the code are those that the code gives now."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from elastic import data
from tests.docs.pages import DOCS

spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
PAGES: dict[str, str] = generate.pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_what_is_committed_is_what_the_code_says(name: str):
    committed = (DOCS / name).read_text()
    assert committed == PAGES[name], "run `make docs`, and commit what it changes"


def test_every_command_and_option_has_a_text():
    commands = dict(generate.commands(get_command(generate.app), "elastic"))
    assert {"elastic run", "elastic checkpoint best", "elastic chaos run"} <= commands.keys()
    assert [path for path, command in commands.items() if not command.help] == []


@pytest.mark.parametrize("function", [data.parquet, data.pack_tokens])
def test_every_parameter_is_listed(function):
    names = inspect.signature(function).parameters
    listed = re.findall(r"^\| `(\w+)` ", generate.parameters_table(function), re.M)
    assert sorted(listed) == sorted(names)


def test_a_command_of_any_make_is_shown(tmp_path: Path):
    app = typer.Typer()

    @app.command()
    def first(place: str, more: list[str], size: int = 3, is_dry: bool = False) -> None:
        """Does | it <now>."""

    @app.command()
    def second() -> None:
        """Nothing."""

    found = dict(generate.commands(get_command(app), "x"))
    text = generate.command_section("x first", found["x first"])
    assert "```\nx first PLACE MORE... [OPTIONS]\n```" in text
    assert "| `--size` | `3` |" in text
    assert generate.command_section("x second", found["x second"]) == (
        "## x second\n\n```\nx second\n```\n\nNothing.\n"
    )
    assert generate.cell("a | <b>\n `<c>`") == "a \\| &lt;b> `<c>`"
