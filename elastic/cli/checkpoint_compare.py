"""`elastic checkpoint diff | best`: which checkpoint is which, and which to take.

What is compared and how is in workers/checkpoint/diff.py and elastic/checkpoint.py.
"""

import sys
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from elastic import checkpoint
from elastic.cli.checkpoint import (
    RunDir,
    Step,
    one_at,
    progress_bar,
    read_manifest,
)
from elastic.cli.text import printable, text_of
from elastic.protocol.errors import DamagedCheckpoint, WrongInput
from elastic.store.files import encode

if TYPE_CHECKING:
    from workers.checkpoint.diff import Difference

app = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


class Mode(StrEnum):
    MIN = "min"
    MAX = "max"


@app.command()
def diff(
    run_dir: RunDir,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another, or the same again.")],
    step: Step = None,
    other_step: Annotated[int | None, typer.Option(help="Of OTHER; default: its newest.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Only the model's tensors.")] = False,
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints bit by bit; exit status 0 if they are equal, 1 if not."""
    chosen_pairs = [one_at(run_dir, step), one_at(other, other_step)]

    from workers.checkpoint.diff import compare  # torch loads here
    from workers.checkpoint.stream import CheckpointReader

    try:
        size_bytes = sum(read_manifest(*pair).size_bytes for pair in chosen_pairs)
        with progress_bar("comparing", None if weights else size_bytes) as on_bytes:
            here, there = (CheckpointReader(*pair, on_bytes) for pair in chosen_pairs)
            found = compare(here, there, "model/" if weights else "")
    except DamagedCheckpoint as error:
        print(f"elastic: DAMAGED: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(encode({"is_equal": found.is_empty, **asdict(found)}).decode())
    else:
        print_difference(found, [f"{c.of_step(at)}" for c, at in chosen_pairs])
    return 0 if found.is_empty else 1


def print_difference(found: "Difference", places: list[str]) -> None:
    for place, names in zip(places, (found.only_here, found.only_there), strict=True):
        for name in names:
            print(f"only in {place}: {printable(name)}")
    for kind in found.kinds:
        print(f"{kind.name}: {kind.here} here, {kind.there} there")
    if found.unequal:
        table = Table("tensor", "elements that differ", "of", "largest difference")
        for tensor in found.unequal:
            differing, most = str(tensor.num_different), f"{tensor.max_abs:.3g}"
            table.add_row(text_of(tensor.name), differing, str(tensor.num_elements), most)
        Console().print(table)
    for part in found.others:
        print(f"differs apart from tensors: {printable(part)}")
    print(f"{len(found.unequal)} tensors differ, {found.num_equal} are equal bit for bit")


@app.command()
def best(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Its run, path or URI.")],
    metric: Annotated[
        str, typer.Option(help="A field of metrics.jsonl, a logged name, or evaluation/NAME.")
    ] = "loss",
    mode: Annotated[Mode, typer.Option(help="Whether less or more is better.")] = Mode.MIN,
    as_json: AsJson = False,
) -> int:
    """The checkpoint at whose step a metric is best; its every byte is verified."""
    try:
        found = checkpoint.best(run_dir, metric, mode.value)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if as_json:
        print(encode(asdict(found)).decode())
    else:
        print(f"step {found.step}, {metric} {found.value:.6g}: {found.path}")
    for damage in found.damaged:
        print(f"better, but DAMAGED: {damage}", file=sys.stderr)
    return 0
