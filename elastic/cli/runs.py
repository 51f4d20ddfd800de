"""`elastic ls`: the runs of a storage."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from elastic.cli.share_table import size_text
from elastic.cli.text import text_of
from elastic.observe.runs import Listed, as_json, runs_in
from elastic.protocol.errors import WrongInput
from elastic.store.files import encode, open_folder
from elastic.store.remote import shown_uri


def ls(
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="A folder or a URI that holds runs.")
    ],
    is_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> int:
    """List the runs of a storage: name, state, steps, last change, size; the newest first."""
    folder = open_folder(storage)
    if not folder.is_there:
        raise WrongInput(f"{shown_uri(storage)}: there is no such folder")
    runs = runs_in(folder)
    if is_json:
        print(encode(as_json(runs)).decode())
    elif not runs:
        print(f"no run in {shown_uri(storage)}")
    else:
        Console(soft_wrap=True).print(table_of(runs))
    return 0


def table_of(runs: list[Listed]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "state", "steps", "changed", "size"):
        table.add_column(column, no_wrap=column != "run", overflow="fold")
    for run in runs:
        table.add_row(
            text_of(run.name),
            text_of(run.state),
            f"{run.step}/{'-' if run.steps is None else run.steps}",
            when(run.changed_at),
            size_text(run.size_bytes),
        )
    return table


def when(at: float | None) -> str:
    """In UTC, as all times that are told of a run."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
