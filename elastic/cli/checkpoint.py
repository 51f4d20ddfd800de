"""`elastic checkpoint ls | show | verify | hash`: what a run's checkpoints hold, from outside.

Reading one executes nothing, whoever wrote it. Writing is workers/checkpoint/saver.py's.
"""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    FileSizeColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from elastic.cli.text import text_of
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import MANIFEST, Manifest
from elastic.store.catalogue import ASIDE, PINNED, Catalogue, step_named
from elastic.store.files import open_folder

app = typer.Typer(
    no_args_is_help=True, help="What a run's checkpoints hold; to and from other formats."
)

CHECKPOINTS = "checkpoints"
"""Their folder in a run directory."""
COLUMNS = ("step", "saved", "size", "files", "tensors", "generation", "pinned", "manifest")
WIDEST = 1000
"""Of a table: a terminal may wrap its lines, but nothing is cut off."""
RunDir = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR", help="The run directory, or the folder of one checkpoint; path or URI."
    ),
]
Step = Annotated[int | None, typer.Option(help="The checkpoint; default: the newest.")]


def checkpoints_at(place: str, step: int | None = None) -> tuple[Catalogue, int | None]:
    """The checkpoints of a run, and the step of the one that is meant: None where neither `step`
    nor `place`, which may be the folder of a checkpoint, says so. WrongInput if there is none."""
    folder = open_folder(place)
    own = None if folder.exists(CHECKPOINTS) else step_named(folder.name)
    if own is None:
        catalogue = Catalogue(folder.at(CHECKPOINTS))
        if not catalogue.folder.folders():
            what = "has no checkpoints" if folder.is_there else "does not exist"
            raise WrongInput(f"{place} {what}")
        return catalogue, step
    if step not in (None, own):
        raise WrongInput(f"{place} is the checkpoint of step {own}; leave out --step {step}")
    return Catalogue(folder.parent), own


def chosen(catalogue: Catalogue, step: int | None) -> int:
    """The newest for None. WrongInput if it is not published."""
    steps = catalogue.steps()
    if not steps:
        raise WrongInput(f"{catalogue.folder} has no published checkpoint")
    if step is not None and step not in steps:
        raise WrongInput(f"there is no checkpoint of step {step}; there are {steps}")
    return steps[-1] if step is None else step


def one_at(place: str, step: int | None) -> tuple[Catalogue, int]:
    """As `checkpoints_at`, and the newest where nothing else is meant."""
    catalogue, meant = checkpoints_at(place, step)
    return catalogue, chosen(catalogue, meant)


def each_at(place: str, step: int | None = None) -> tuple[Catalogue, list[int]]:
    """As `checkpoints_at`, and all where no single one is meant."""
    catalogue, meant = checkpoints_at(place, step)
    return catalogue, catalogue.steps() if meant is None else [chosen(catalogue, meant)]


@app.command()
def ls(run_dir: RunDir) -> int:
    """The checkpoints, oldest first. Says which manifests are damaged; reads no tensors."""
    catalogue, steps = each_at(run_dir)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for step in steps:
        try:
            m = catalogue.manifest(step)
        except DamagedCheckpoint as error:
            what = f"DAMAGED: {text_of(error.what)}"
            table.add_row(str(step), *["-"] * (len(COLUMNS) - 2), what)
            continue
        saved = datetime.fromtimestamp(catalogue.of_step(step).modified(MANIFEST) or 0)
        counts = [decimal(m.size_bytes), *map(str, (len(m.files), len(m.tensors), m.generation))]
        pinned = "yes" if m.about.get(PINNED) else ""
        table.add_row(str(step), f"{saved:%Y-%m-%d %H:%M:%S}", *counts, pinned, "good")
    Console(width=WIDEST).print(table)
    for name in catalogue.folder.folders():
        if ASIDE in name:
            print(f"set aside as damaged: {name}")
    return 0


@app.command()
def show(run_dir: RunDir, step: Step = None) -> int:
    """The tensors of a checkpoint: name, dtype, shape, chunks."""
    manifest = read_manifest(*one_at(run_dir, step))
    table = Table("tensor", "dtype", "shape", "chunks")
    for tensor in manifest.tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        table.add_row(text_of(tensor.name), text_of(tensor.dtype), shape, str(len(tensor.chunks)))
    Console().print(table)
    print(f"step {manifest.step}, {decimal(manifest.size_bytes)} in {len(manifest.files)} files")
    return 0


@app.command()
def verify(
    run_dir: RunDir,
    step: Annotated[int | None, typer.Option(help="The checkpoint; default: each.")] = None,
) -> int:
    """Read every byte again and compare it with its checksum; exit status 1 if any differs."""
    catalogue, steps = each_at(run_dir, step)
    num_damaged = 0
    for each in steps:
        try:
            with progress_bar(f"step {each}", catalogue.manifest(each).size_bytes) as on_bytes:
                for size_bytes in catalogue.verify(each):
                    on_bytes(size_bytes)
        except DamagedCheckpoint as error:
            num_damaged += 1
            print(f"step {each}: DAMAGED: {error}")
            continue
        strangers = ", ".join(catalogue.strangers(each))
        print(f"step {each}: good" + (f"; foreign files: {strangers}" if strangers else ""))
    return 1 if num_damaged else 0


@app.command("hash")
def weights_hash(run_dir: RunDir, step: Step = None) -> int:
    """weights_sha256 of the weights in a checkpoint, every byte verified."""
    from workers.checkpoint.load import checkpoint_sha256  # torch loads here

    found = one_at(run_dir, step)
    try:
        print(checkpoint_sha256(*found))
    except DamagedCheckpoint as error:
        print(f"DAMAGED: {error}", file=sys.stderr)
        return 1
    return 0


def read_manifest(catalogue: Catalogue, step: int) -> Manifest:
    try:
        return catalogue.manifest(step)
    except DamagedCheckpoint as error:
        raise WrongInput(str(error)) from error


@contextmanager
def progress_bar(what: str, size_bytes: int | None) -> Generator[Callable[[int], object]]:
    """On stderr; gives the function that is told of bytes. size_bytes: None where unknown."""
    size = FileSizeColumn() if size_bytes is None else DownloadColumn()
    text, console = TextColumn("{task.description}"), Console(file=sys.stderr)
    with Progress(text, BarColumn(), size, TransferSpeedColumn(), console=console) as progress:
        task = progress.add_task(what, total=size_bytes)
        yield lambda count: progress.advance(task, count)
        progress.update(task, completed=size_bytes)  # headers and checksums were read, too
