"""`elastic data plan | check`: what a Parquet data set holds for a run, and what a run used of it.

Reading happens in this process; no Ray.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from elastic.cli.journal import config_of
from elastic.cli.text import printable
from elastic.driver.redaction import hidden_in, other_secrets
from elastic.driver.resume import plain
from elastic.protocol.errors import BadData, WrongInput
from elastic.store.files import Folder, check_kinds, open_folder
from elastic.store.journal import read_records
from elastic.store.remote import shown_uri

if TYPE_CHECKING:
    from elastic.data.record import FeedRecord
    from elastic.workload import Workload

app = typer.Typer(no_args_is_help=True, help="Show a data set's plan; check what a run used.")
MAX_SHOWN = 10
CONFIG_KINDS = {"target": str, "arguments": dict, "seed": int, "global_batch": int}
SAMPLES_KINDS = {"step": int, "first": int, "count": int, "sha256": str}


@app.command()
def plan(
    path: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Files, folders or URIs; asked in TARGET's folder, the plan is that of its runs.",
        ),
    ],
    global_batch: Annotated[int, typer.Option(min=1, help="Rows per step, to count steps.")] = 256,
    columns: Annotated[str | None, typer.Option(help="Names, with commas between.")] = None,
    window_bytes: Annotated[int, typer.Option(help="As in elastic.data.parquet.")] = 32 * 2**20,
    prefetch_bytes: Annotated[int, typer.Option(help="As in elastic.data.parquet.")] = 256 * 2**20,
    seed: Annotated[int, typer.Option(help="The run's.")] = 0,
) -> int:
    """Units, rows, steps per epoch and expected memory of Parquet files; reads their footers."""
    from elastic import data
    from elastic.data.footers import make_plan

    names = columns.split(",") if columns else None
    try:
        source = data.parquet(
            path, columns=names, window_bytes=window_bytes, prefetch_bytes=prefetch_bytes
        )
    except ValueError as error:
        raise WrongInput(str(error)) from error
    made = make_plan(source.within(str(Path.cwd())), seed, is_wary=True)
    units, windows = made.units, made.windows(0)
    sizes = sorted(sum(u.size_bytes for u in window) for window in windows)
    steps, rest = divmod(made.num_rows, global_batch)
    ahead = min(source.prefetch_bytes, sum(sizes))
    table = Table(show_header=False, box=None)
    for name, value in (
        ("files", f"{len(made.files)}, {sum(not f.num_rows for f in made.files)} of them empty"),
        ("columns", made.schema),
        ("rows", f"{made.num_rows:,}"),
        ("units", f"{len(units)} row groups of {_range([u.num_rows for u in units])} rows"),
        ("windows", f"{len(windows)} per epoch, the largest {decimal(sizes[-1])}"),
        ("epoch", f"{steps} steps of {global_batch} and {rest} rows, {decimal(sum(sizes))}"),
        ("memory", f"about {decimal(max(ahead, sizes[-1]))} of the object store, uncompressed"),
        ("plan", made.hash),
    ):
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)
    if sizes[-1] > source.prefetch_bytes:
        print("a window is larger than prefetch_bytes; smaller row groups need less memory")
    return 0


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


@app.command()
def check(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Path or URI.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Arguments that are secret: not on record."
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Run the code that a run directory of others, or in a bucket, names."
        ),
    ] = False,
) -> int:
    """Whether the committed steps used each sample exactly once; exit status 1 if not.

    Imports the run's TARGET, for its `dataset()`: the code that config.json names runs here. A run
    directory that is not your own, and any in a bucket, needs --trust.
    """
    from elastic.data.checking import Repeated
    from elastic.data.checking import check as compare
    from elastic.driver.target import load_target, parse_arguments

    folder = open_folder(run_dir)
    config = config_of(folder, run_dir)
    check_kinds(config, CONFIG_KINDS, f"{run_dir}/config.json")
    committed = read_records(folder, "metrics.jsonl", {"step": int})  # first: a live run writes on
    lines = read_records(folder, "samples.jsonl", SAMPLES_KINDS)
    if not lines:
        raise WrongInput(f"{run_dir} has no committed step yet: nothing to check")
    place = run_dir if "://" in run_dir else str(Path(run_dir).absolute())
    arguments = {**config["arguments"], **parse_arguments(settings or ())}
    check_secrets(config, arguments)
    text = target_text(config)
    if not trust and not is_own(folder):
        raise WrongInput(
            f"{shown_uri(run_dir)} is not known to be yours, and checking runs the code that it "
            f"names, {text!r}; give --trust if you know who wrote it"
        )
    print(f"elastic: importing {printable(text)}, as the run directory says", file=sys.stderr)
    target = load_target(text, arguments)
    try:
        with contextlib.chdir(target.folder or Path.cwd()):  # as in a worker
            stream, size = stream_of(target.workload, config["seed"], place, target.folder)
            found = compare(lines, stream, config["global_batch"])
    except Repeated as error:
        print(f"NOT exactly once: {error}")
        return 1
    except BadData as error:
        raise WrongInput(f"the data cannot be read again: {error}") from error
    if committed and found.steps < committed[-1]["step"] and not found.findings:
        print(
            f"NOT exactly once: {committed[-1]['step']} steps are committed, and the record has "
            f"{found.steps}"
        )
        return 1
    for finding in found.findings[:MAX_SHOWN]:
        print(finding)
    if found.findings:
        print(f"NOT exactly once: {len(found.findings)} of {found.steps} steps differ")
        return 1
    print(
        f"{found.steps} steps used {found.rows:,} rows, each as planned: {found.epochs} whole "
        f"epoch{'s' * (found.epochs != 1)}{size}, no row lost, repeated or out of order"
    )
    return 0


def check_secrets(config: dict[str, Any], arguments: dict[str, Any]) -> None:
    """WrongInput unless `arguments` have all of the run's secrets."""
    if hidden := hidden_in(arguments):
        raise WrongInput(f"{hidden[0]!r} is secret and not on record: give --set {hidden[0]}=...")
    if others := other_secrets(config, cast("dict[str, Any]", plain(arguments))):
        raise WrongInput(f"the argument {others[0]!r}, a secret, is not the one of the run")


def left_out_words(record: "FeedRecord") -> str:
    """What an epoch goes without; empty if it has all rows."""
    counted = {"file": sum(bool(f.problem) for f in record.plan.files)}
    counted["row group"] = record.num_left_out
    parts = [f"{n} {what}{'s' * (n != 1)}" for what, n in counted.items() if n]
    return f" without {' and '.join(parts)} that could not be read" if parts else ""


def is_own(folder: Folder) -> bool:
    """Whether this user owns the run directory; who may write to a bucket is not known."""
    if folder.local is None:
        return False
    places = (folder.local, folder.local / "config.json")
    return all(os.stat(place).st_uid == os.geteuid() for place in places)


def target_text(config: dict[str, Any]) -> str:
    """TARGET as it can be imported from any folder, if its file is still where it was."""
    file = config.get("target_file")
    if file is None or not Path(file).is_file():
        return config["target"]
    return f"{file}:{config['target'].rpartition(':')[2]}"


def stream_of(
    workload: "Workload", seed: int, run_dir: str, folder: Path | None
) -> tuple[Iterator[tuple[int, Any]], str]:
    """The stream that the run's dataset() and seed give, and the size of an epoch in words.

    folder: TARGET's.
    """
    from elastic.data import ParquetSource
    from elastic.data.checking import planned_stream
    from elastic.data.footers import make_plan
    from elastic.data.record import open_record
    from workers.step.randomness import seed_dataset

    seed_dataset(seed)
    dataset = workload.dataset()
    if isinstance(dataset, ParquetSource):
        source = dataset if folder is None else dataset.within(str(folder))
        record = open_record(make_plan(source, seed), run_dir)
        return planned_stream(record), left_out_words(record)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise WrongInput(
            f"dataset() returns a {type(dataset).__name__}, whose order is not planned: only "
            "elastic.data.parquet(...) and map-style datasets can be checked"
        )
    return map_style(len(dataset), seed), f" of {len(dataset):,} rows"


def map_style(num_rows: int, seed: int) -> Iterator[tuple[int, Any]]:
    """(epoch, row ids) of a map-style dataset's stream."""
    from workers.data.order import SampleOrder

    order, part, position = SampleOrder(num_rows, seed), 4096, 0
    while True:
        epoch, place = divmod(position, num_rows)
        count = min(part, num_rows - place)
        yield epoch, order.rows(position, count)
        position += count
