"""`elastic logs`: what the workers of a run have printed; from outside, what its driver has.

How it gets there is workers/worker_log.py's.
"""

import time
from collections import deque
from typing import Annotated

import typer

from elastic.cli.journal import RunDir, open_run
from elastic.cli.outside import Cluster, conclude, on_cluster, open_server, tell
from elastic.cli.progress import LOOK_EVERY_S, LOOK_REMOTE_EVERY_S
from elastic.cli.text import printable
from elastic.driver.resume import read_past_run
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder
from elastic.store.journal import appended, joined
from elastic.store.remote import shown_uri

FOLDER, ENDING = "logs", ".log"
EACH_SHOWS = 10
"""Lines of each worker, where none is named."""


def logs(
    run_dir: RunDir,
    worker: Annotated[
        str | None,
        typer.Argument(metavar="[WORKER]", help="Its name, as w3; default: the end of each log."),
    ] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many lines at the end.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends; Ctrl-C ends it.")
    ] = False,
    cluster: Cluster = None,
) -> int:
    """Print what a run's workers have printed. With --cluster and no WORKER: what `elastic run`
    prints there."""
    if cluster is not None:
        return from_outside(cluster, run_dir, worker, tail=tail, follow=follow)
    folder = open_run(run_dir)
    names = sorted(n for n in folder.at(FOLDER).names() if n.endswith(ENDING))
    if worker is None:
        if follow:
            raise WrongInput("--follow needs WORKER: one log at a time is followed")
        return print_ends(folder, names, EACH_SHOWS if tail is None else tail)
    name = worker.removesuffix(ENDING) + ENDING
    if name not in names:
        there = ", ".join(n.removesuffix(ENDING) for n in names)
        known = f"there are those of {there}" if names else NONE_YET
        raise WrongInput(f"{shown_uri(run_dir)} has no log of {worker!r}: {known}")
    return print_log(folder, name, tail, follow=follow)


NONE_YET = "it has none yet; in a bucket they come some seconds later"


def from_outside(
    cluster: str, run: str, worker: str | None, *, tail: int | None, follow: bool
) -> int:
    options = [*([] if tail is None else ["--tail", str(tail)]), *(["--follow"] if follow else [])]
    if worker is not None:
        return on_cluster(cluster, "logs", run, worker, *options)
    server = open_server(cluster)
    if (job := server.find(run)) is None:
        return on_cluster(cluster, "logs", run, *options)
    if not follow:
        for line in deque(server.log(job.id), tail):
            print(printable(line))
        return conclude(job) if job.is_unprepared else 0
    try:
        return conclude(server.follow(job.id, tell))
    except KeyboardInterrupt:
        print("no longer following; the run is left alone")
        return 0


def print_ends(folder: Folder, names: list[str], num_lines: int) -> int:
    if not names:
        raise WrongInput(f"{folder}: {NONE_YET}")
    for name in names:
        print(f"--- {printable(name.removesuffix(ENDING))}")
        for line in deque(lines_of(joined(folder.at(FOLDER), name)), num_lines):
            print(line)
    return 0


def print_log(folder: Folder, name: str, tail: int | None, *, follow: bool) -> int:
    """Only whole lines: what a worker is just writing comes with its end."""
    every_s = LOOK_EVERY_S if folder.local else LOOK_REMOTE_EVERY_S
    offset, is_last = 0, not follow
    while True:
        content = appended(folder.at(FOLDER), name, offset)
        whole = content if is_last else content[: content.rfind(b"\n") + 1]
        lines = lines_of(whole)
        for line in deque(lines, tail) if offset == 0 else lines:
            print(line, flush=True)
        offset += len(whole)
        if is_last:
            return 0
        past = read_past_run(folder)
        is_last = past is None or past.is_over
        if not is_last:
            time.sleep(every_s)


def lines_of(content: bytes) -> list[str]:
    return [printable(line) for line in content.decode(errors="replace").splitlines()]
