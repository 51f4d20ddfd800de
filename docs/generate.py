"""Writes the pages that come from the code: `python docs/generate.py` after an option or a field
has changed.

`tests/docs/test_generated.py` compares them with what is committed. The texts are the code's own
help, docstrings and comments: mend them there.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.main import get_command

from elastic import data
from elastic.cli.app import app
from elastic.config import GROUPS, FaultPolicy, RunConfig
from elastic.control import accounting
from elastic.protocol import reports
from elastic.protocol.mesh import Parallel
from elastic.protocol.timeouts import UNLIMITED_S, Timeouts, timeouts_of
from workers.scripts.in_place import rule

FOLDER = Path(__file__).resolve().parent
NOTE = "<!-- Made by docs/generate.py from the code. Do not edit this page. -->\n"


def cell(text: str) -> str:
    """`text` in a table's cell; outside of code, what looks like HTML is none. A `|` in code would
    be shown with its backslash, so that there is none."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(p if i % 2 else p.replace("<", "&lt;") for i, p in enumerate(parts))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell(text) for text in line)} |\n" for line in lines)


# --- the command line --------------------------------------------------------------
def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def option_row(option: Any) -> tuple[str, str, str]:
    name = f"`{', '.join(option.opts)}`"
    if option.metavar:
        name += f" `{option.metavar}`"
    default = "required" if option.required else shown(option.default)
    return name, "-" if option.is_flag else default, option.help or ""


def word_of(argument: Any) -> str:
    more = "..." if argument.nargs != 1 else ""
    return argument.metavar or argument.name.upper() + more


def shown(value: object) -> str:
    return "-" if value is None or value == () else f"`{value}`"


def command_section(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    words = [word_of(a) if a.required else f"[{word_of(a)}]" for a in arguments]
    usage = " ".join([path, *words, *(["[OPTIONS]"] if options else [])])
    text = f"## {path}\n\n```\n{usage}\n```\n\n{inspect.cleandoc(command.help or '')}\n"
    if arguments:
        rows = [(f"`{word_of(a)}`", a.help or "") for a in arguments]
        text += "\n" + table(("argument", "meaning"), rows)
    if options:
        text += "\n" + table(("option", "default", "meaning"), [option_row(o) for o in options])
    return text


def cli_page() -> str:
    root: Any = get_command(app)
    found = sorted(commands(root, "elastic"), key=lambda c: (c[0] != "elastic run", c[0]))
    sections = [command_section(path, command) for path, command in found]
    about = (
        f"# Command line\n\n{root.help} [Running](running.md) tells what the commands are for.\n"
        "Exit status: 0 succeeded, 1 failed or stopped, 2 wrong input.\n"
    )
    return "\n".join([NOTE, about, *sections])


# --- settings ------------------------------------------------------------------------
def texts_of(cls: type) -> dict[str, tuple[str, str]]:
    """Of each field of a class: its annotation and the docstring below it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    for line, below in pairwise(tree.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = str(below.value.value) if is_text else ""
            found[line.target.id] = ast.unparse(line.annotation).replace(" | ", " or "), text
    return found


def default_of(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is MISSING else f"`{field.type.__name__}()`"


def fields_table(cls: type) -> str:
    texts = texts_of(cls)
    rows = [
        (f"`{f.name}`", f"`{texts[f.name][0]}`", default_of(f), texts[f.name][1])
        for f in fields(cls)
    ]
    return table(("field", "type", "default", "meaning"), rows)


def parameters_table(function: Any) -> str:
    """Of a function whose docstring has a paragraph `name: text` per parameter."""
    text = inspect.getdoc(function) or ""
    named = re.findall(r"^(\w+): ((?:.*\n?)(?:    .*\n?)*)", text, re.M)
    parameters = inspect.signature(function).parameters
    rows: list[tuple[str, ...]] = []
    for name, meaning in named:
        default = parameters[name].default
        shown_default = "required" if default is inspect.Parameter.empty else f"`{default!r}`"
        rows.append((f"`{name}`", shown_default, meaning))
    return table(("parameter", "default", "meaning"), rows)


def seconds(value: float) -> str:
    return "no limit" if value >= UNLIMITED_S else f"{value:g} s"


def timeouts_table() -> str:
    texts, usual, never = texts_of(Timeouts), timeouts_of(3.0), timeouts_of(None)
    rows: list[tuple[str, ...]] = []
    for f in fields(Timeouts):
        values = (seconds(getattr(usual, f.name)), seconds(getattr(never, f.name)))
        rows.append((f"`{f.name}`", *values, texts[f.name][1]))
    return table(("timeout", "`detect_s=3`", "`detect_s=None`", "meaning"), rows)


def settings_section(cls: type) -> str:
    return f"## {cls.__name__}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n\n{fields_table(cls)}"


def configuration_page() -> str:
    settings = "\n".join(map(settings_section, (Parallel, *GROUPS.values(), FaultPolicy)))
    return f"""{NOTE}
# Configuration

`elastic.run(workload, ...)` takes the fields of `RunConfig` as keywords.
The [command line](cli.md) has an option for each of them.

## RunConfig

{inspect.cleandoc(RunConfig.__doc__ or "")}

{fields_table(RunConfig)}
{settings}
## elastic.data.parquet

{(inspect.getdoc(data.parquet) or "").partition(chr(10))[0]}

{parameters_table(data.parquet)}
## elastic.data.pack_tokens

{(inspect.getdoc(data.pack_tokens) or "").partition(chr(10))[0]}

{parameters_table(data.pack_tokens)}
## Timeouts

These deadlines derive from `detect_s`.

{timeouts_table()}"""


# --- Python ----------------------------------------------------------------------------------
def signature_of(function: Any) -> str:
    """As in the source, but for `self` and the quotes of annotations; the same in every Python."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.args.args = [a for a in tree.args.args if a.arg != "self"]
    returned = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    return f"({ast.unparse(tree.args)}){returned}".replace("'", "")


def class_section(title: str, cls: type) -> str:
    """What a class says of itself, a table of what can be read, and its public methods."""
    values: list[tuple[str, ...]] = []
    for name, (_, text) in texts_of(cls).items():
        values.append((f"`{name}`", text))
    methods: list[str] = []
    for name, member in vars(cls).items():
        if isinstance(member, property):
            values.append((f"`{name}`", inspect.getdoc(member) or ""))
        elif inspect.isfunction(member) and not name.startswith("_"):
            text = inspect.getdoc(member) or ""
            methods.append(f"### {title}.{name}\n\n`{name}{signature_of(member)}`\n\n{text}\n")
    about = f"## {title}\n\n{inspect.getdoc(cls) or ''}\n"
    listed = [table(("to read", "meaning"), values)] if values else []
    return "\n".join([about, *listed, *methods])


def python_page() -> str:
    from elastic.driver.launch import Result, RunFailed, run
    from elastic.workload import Workload
    from workers.session import Session, Step  # torch loads here

    about = """# Python

[Coming from DDP](coming_from_ddp.md) shows a loop of your own with `Session` and `Step`.
"""
    start = f"## elastic.run\n\n`run{signature_of(run)}`\n\n{inspect.getdoc(run)}\n"
    sections = [
        class_section("elastic.Result", Result),
        class_section("elastic.Workload", Workload),
        class_section("Session", Session),
        class_section("Step", Step),
    ]
    failed = f"## elastic.RunFailed\n\n{inspect.getdoc(RunFailed)}\n"
    return "\n".join([NOTE, about, start, failed, *sections])


# --- words -------------------------------------------------------------------------------
def words_table(module: Any, name: str) -> str:
    """A tuple of words, with the comment that stands behind each."""
    source = inspect.getsource(module)
    (block,) = re.findall(rf"^{name}\b[^(]*= \((.*?)^\)", source, re.M | re.S)
    rows = [(f"`{w}`", c) for w, c in re.findall(r'"(\w+)",(?:  # (.*))?', block)]
    assert [f"`{w}`" for w in getattr(module, name)] == [w for w, _ in rows]
    has_texts = any(text for _, text in rows)
    return table(("word", "meaning"), rows) if has_texts else ", ".join(w for w, _ in rows) + "\n"


def words_page() -> str:
    return f"""{NOTE}
# Words in files

The complete lists of what a program may meet in the files of a run directory.

## Phases of a run

`phase` in `status.json`: {words_table(reports, "RUN_PHASES")}
## States of a worker

`state` in `status.json`.

{words_table(reports, "WORKER_STATES")}
## Outcomes

`outcome` in `result.json`.

{words_table(reports, "OUTCOMES")}
## Causes of a loss

`cause` of a recovery in `result.json`, and of a lost worker in the journal.

{words_table(reports, "CAUSES")}
## Where time goes

`badput` in `result.json`: every second that is not goodput is in one of these buckets.

{words_table(accounting, "BUCKETS")}"""


# --- rooms -------------------------------------------------------------------------------
def architecture_page() -> str:
    """The page as it is, but for the table of rooms: what the packages say of themselves."""
    root, rows = FOLDER.parent, list[tuple[str, ...]]()
    for path in sorted([*root.glob("elastic/*/__init__.py"), *root.glob("workers/*/__init__.py")]):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append((f"`{path.parent.relative_to(root)}/`", text))
    before, begin, rest = (FOLDER / "architecture.md").read_text().partition("<!-- rooms -->\n")
    _, end, after = rest.partition("<!-- /rooms -->\n")
    return before + begin + "\n" + table(("folder", "what lives there"), rows) + "\n" + end + after


# --- the rule of level 1 -------------------------------------------------------------------
def script_page() -> str:
    """The page as it is, but for what does not meet the rule."""
    text = "\n"
    for clause in rule.Clause:
        told = [o.docs for o in rule.OBSTACLES if o.clause is clause and o.docs]
        text += f"{clause.value}. Not so with\n\n" + "".join(f"- {docs};\n" for docs in told)
        text = text.removesuffix(";\n") + ".\n\n"
    before, begin, rest = (FOLDER / "your-script.md").read_text().partition("<!-- rule -->\n")
    _, end, after = rest.partition("<!-- /rule -->\n")
    return before + begin + text + end + after


def pages() -> dict[str, str]:
    made = {
        "architecture.md": architecture_page(),
        "cli.md": cli_page(),
        "configuration.md": configuration_page(),
        "python.md": python_page(),
        "words.md": words_page(),
        "your-script.md": script_page(),
    }
    return {name: text.rstrip("\n") + "\n" for name, text in made.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
