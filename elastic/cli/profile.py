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
        int | None,
        typer.Option(
            min=1,
            help="One of those that are traced; default: the newest. Traced are the first step of "
            "each generation, and one each time that an eighth of a second per rank has passed: of "
            "slow steps all or most.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write; default: step-N.trace.json in this folder."),
    ] = None,
) -> int:
    """Write one step of all ranks as a trace for https://ui.perfetto.dev (Chrome trace JSON)."""
    folder = open_run(run_dir)
    rows, near = rows_of(folder, step)
    if not rows:
        listed = ", ".join(map(str, near))
        what = f"no trace of step {step}, only of some steps: nearest first {listed}"
        raise WrongInput(f"{shown_uri(run_dir)}: {NAME} has {what if near else 'no trace'}")
    path = out or Path(f"step-{rows[0]['step']}.trace.json")
    path.write_bytes(encode(trace_of(rows, folder.name)) + b"\n")
    print(f"step {rows[0]['step']} of {counted(len(rows), 'rank')}: {path}")
    return 0
