"""`elastic checkpoint export`: a checkpoint for programs that are not ours.

The formats are in workers/checkpoint_export.py.
"""

import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from elastic.checkpoint_cli import RunDir, Step, app, catalogue_of, chosen, read_manifest
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import Manifest
from elastic.store.exports import publishing
from elastic.store.files import first_line

__all__ = ["app"]
UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


class Format(StrEnum):
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"


@app.command()
def export(
    run_dir: RunDir,
    path: Annotated[str, typer.Argument(help="A folder; with --to torch, a file.")],
    to: Annotated[Format, typer.Option(help="The format.")],
    step: Step = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of a safetensors file, such as 500MB or 2GiB.")
    ] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export.")] = False,
) -> int:
    """Write a checkpoint for torch DCP, torch.load or Hugging Face safetensors, verified."""
    catalogue = catalogue_of(run_dir)
    step = chosen(catalogue, step)
    max_shard_bytes = parse_size(max_shard_size)
    size_bytes = tensor_bytes(read_manifest(catalogue, step), to)
    try:
        with publishing(path, is_folder=to is not Format.TORCH, overwrite=overwrite) as temporary:
            from workers import checkpoint_export as formats  # torch loads here
            from workers.checkpoint_stream import CheckpointReader

            with progress_bar(f"step {step} to {to}", size_bytes) as on_bytes:
                reader = CheckpointReader(catalogue, step, on_bytes)
                if to is Format.DCP:
                    notes = formats.export_dcp(reader, temporary)
                elif to is Format.TORCH:
                    notes = formats.export_torch(reader, temporary)
                else:
                    notes = formats.export_safetensors(reader, temporary, max_shard_bytes)
    except DamagedCheckpoint as error:
        return failed(f"DAMAGED: {error}")
    except OSError as error:
        return failed(f"{path} cannot be written: {first_line(error)}")
    for note in notes:
        print(f"elastic: {note}", file=sys.stderr)
    print(f"step {step} exported to {Path(path)}")
    return 0


def failed(message: str) -> int:
    print(f"elastic: {message}", file=sys.stderr)
    return 1


def parse_size(text: str) -> int:
    """Bytes; WrongInput if it is no positive size."""
    match = re.fullmatch(r"(\d+)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS or not int(match[1]):
        raise WrongInput(f"--max-shard-size {text!r}: write a size such as 500MB, 5GB or 2GiB")
    return int(match[1]) * UNITS[match[2]]


def tensor_bytes(manifest: Manifest, to: Format) -> int:
    """About what an export reads: headers are in the files, too."""
    if to is not Format.SAFETENSORS:
        return manifest.size_bytes
    from workers.checkpoint_stream import size_bytes

    stored = set(manifest.state["weights"].values())
    return sum(size_bytes(t) for t in manifest.tensors if t.name in stored)


@contextmanager
def progress_bar(what: str, size_bytes: int) -> Generator[Callable[[int], object]]:
    """On stderr; gives the function that is told of bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(what, total=size_bytes)
        yield lambda count: progress.advance(task, count)
        progress.update(task, completed=size_bytes)
