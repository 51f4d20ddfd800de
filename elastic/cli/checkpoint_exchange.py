"""`elastic checkpoint export | import`: checkpoints to and from programs that are not ours.

The formats are in workers/checkpoint/export.py and workers/checkpoint/foreign_weights.py.
"""

import contextlib
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic.cli.checkpoint import (
    RunDir,
    Step,
    one_at,
    progress_bar,
    read_manifest,
)
from elastic.driver.target import Target, load_target, parse_arguments
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.protocol.manifest import Manifest
from elastic.store.catalogue import Catalogue
from elastic.store.exports import publishing
from elastic.store.files import first_line, open_folder

if TYPE_CHECKING:
    from workers.checkpoint.foreign_weights import Foreign
    from workers.train_state.train_state import TrainState

app = typer.Typer()
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
    catalogue, step = one_at(run_dir, step)
    max_shard_bytes = parse_size(max_shard_size)
    size_bytes = tensor_bytes(read_manifest(catalogue, step), to)
    try:
        with publishing(path, is_folder=to is not Format.TORCH, overwrite=overwrite) as temporary:
            from workers.checkpoint import export as formats  # torch loads here
            from workers.checkpoint.stream import CheckpointReader

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


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A folder or file of the format.")],
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="<storage>/<name> of a run to come.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="As for `elastic run`.")],
    from_: Annotated[Format, typer.Option("--from", help="The format.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Constructor argument of TARGET."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of values that the source does not have.")] = 0,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out the source's optimizer state.")
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Names that only one side has are no error.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Read DCP, whose metadata is a pickle: it runs code.")
    ] = False,
) -> int:
    """Make the checkpoint of step 0 from foreign weights; `elastic run` begins with it."""
    if from_ is Format.DCP and not trust:
        raise WrongInput(
            "a DCP folder's .metadata is a pickle, and torch's reader runs whatever code is in "
            "it; give --trust if you know who wrote it, or convert it to safetensors"
        )
    path, catalogue = Path(source).expanduser().absolute(), free_catalogue(run_dir)
    made = load_target(target, parse_arguments(settings or ()))

    from workers.checkpoint import importing as importing  # torch loads here

    train_state = build(made, seed)
    found = read_source(path, from_)
    about = {"imported_from": str(path), "format": str(from_), "seed": seed}
    try:
        with progress_bar(f"{from_} to step 0", None) as on_bytes:
            notes = importing.load_foreign(
                train_state, found, on_bytes, is_partial=partial, with_optimizer=not weights_only
            )
            importing.publish_initial(catalogue, train_state, about, on_bytes)
    except OSError as error:
        return failed(f"{run_dir} cannot be written: {first_line(error)}")
    for note in notes:
        print(f"elastic: {note}", file=sys.stderr)
    print(f"{run_dir}: step 0 has these weights; `elastic run` in this place begins with it")
    return 0


def free_catalogue(run_dir: str) -> Catalogue:
    """Of a run that is not there yet; WrongInput if it is."""
    folder = open_folder(run_dir)
    catalogue = Catalogue(folder.at("checkpoints"))
    if folder.exists("config.json") or catalogue.folder.folders():
        raise WrongInput(f"{run_dir} holds a run or checkpoints already; choose another name")
    return catalogue


def build(target: Target, seed: int) -> "TrainState":
    """As a worker does, in the folder where workers run."""
    import torch

    from workers.checkpoint.importing import ImportSettings
    from workers.parallel.ddp import build_replica

    with contextlib.chdir(target.folder or Path.cwd()):
        return build_replica(target.workload, ImportSettings(seed), torch.device("cpu"))


def read_source(path: Path, form: Format) -> "Foreign":
    from workers.checkpoint import foreign_weights

    if form is Format.DCP:
        return foreign_weights.read_dcp(path)
    if form is Format.TORCH:
        return foreign_weights.read_torch(path)
    return foreign_weights.read_safetensors(path)


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
    from workers.checkpoint.stream import size_bytes
    from workers.train_state.state_header import weights_of

    stored = set(weights_of(manifest.state, {t.name for t in manifest.tensors}).values())
    return sum(size_bytes(t) for t in manifest.tensors if t.name in stored)
