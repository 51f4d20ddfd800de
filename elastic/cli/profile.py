"""`elastic profile`: one step of all ranks as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from elastic.cli.journal import RunDir, open_run
from elastic.observe.anatomy import NAME
from elastic.observe.trace import rows_of, trace_of
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted
from elastic.store.files import encode
from elastic.store.remote import shown_uri


def profile(
    run_dir: RunDir,
    step: Annotated[
        int | None, typer.Option(min=1, help="The step; default: the newest that is traced.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; default: step-N.trace.json in this folder."),
    ] = None,
) -> int:
    """Write one step of all ranks as a trace for https://ui.perfetto.dev (Chrome trace JSON)."""
    folder = open_run(run_dir)
    rows, (before, after) = rows_of(folder, step)
    if not rows:
        near = " and ".join(str(n) for n in (before, after) if n is not None)
        what = f"no trace of step {step}; the nearest are of {near}" if near else "no trace"
        raise WrongInput(f"{shown_uri(run_dir)}: {NAME} has {what}")
    path = out or Path(f"step-{rows[0]['step']}.trace.json")
    path.write_bytes(encode(trace_of(rows, folder.name)) + b"\n")
    print(f"step {rows[0]['step']} of {counted(len(rows), 'rank')}: {path}")
    return 0
