"""`elastic status | watch`: where a run stands, once or until it ends, without reading its history.

What is shown of a run that goes on is progress.py's.
"""

import time
from typing import Annotated, Any

import typer
from rich.console import Console

from elastic.cli.absence import NO_STATUS, Absence, said_of
from elastic.cli.journal import RunDir, open_run
from elastic.cli.outcome import level_line, print_outcome, refuse
from elastic.cli.outside import Cluster, on_cluster
from elastic.cli.progress import LOOK_REMOTE_EVERY_S, Progress, worker_table
from elastic.cli.share_table import share_table
from elastic.cli.text import printable, scalars_of
from elastic.driver.resume import PastRun, read_past_run
from elastic.observe.anatomy import newest
from elastic.observe.bubble import measured_bubble
from elastic.protocol.errors import WrongInput
from elastic.protocol.membership import counted
from elastic.store.files import Folder, encode
from elastic.store.journal import read_backwards
from elastic.store.run_directory import check_result, check_status

FAILED = 1
WATCH_EVERY_S = 0.25


def status(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="The content of status.json.")] = False,
    cluster: Cluster = None,
) -> int:
    """Say where a run stands: phase, generation, workers, reason, age of the status."""
    if cluster is not None:
        return on_cluster(cluster, "status", run_dir, *(["--json"] if as_json else []))
    folder = open_run(run_dir, "status")
    past = read_past_run(folder)
    if past is None or (found := past.status) is None:
        raise WrongInput(f"{run_dir}: {NO_STATUS}")
    check_status(found, f"{run_dir}/status.json")
    if as_json:
        print(encode(found).decode())
        return 0
    size = counted(found["world_size"], "worker")
    print(f"{printable(found['phase'])}, generation {found['generation']}, {size}")
    print(step_text(folder, found))
    if layout := found.get("layout"):
        bubble = measured_bubble(folder, found["generation"])
        measured = "" if bubble is None else f"; {bubble:.2f} idle as measured"
        print(printable(str(layout)) + measured)
    if (level := level_line(found)) is not None:
        if reported := report_text(folder):
            print(reported)
        print(printable(level))
    print(f"reason: {printable(found['reason']) or '-'}")
    is_unheard = past.result is None and not past.is_alive
    print(f"status is {past.silent_s:.0f} s old" + (f"; {said_of(past)}" if is_unheard else ""))
    if found["workers"] or found["standby"]:
        Console(soft_wrap=True).print(worker_table(found))
    if rows := newest(folder):
        Console(soft_wrap=True).print(share_table(rows))
    return 0


def step_text(folder: Folder, found: dict[str, Any]) -> str:
    """found: of status.json. A script's steps are its optimizers'; where none is on record, as at
    level 0, there are its reports."""
    if "level" not in found:
        return f"step {found['step']} of {found['steps']}"
    newest = next(read_backwards(folder, "metrics.jsonl"), None)
    if newest is not None and isinstance(step := newest.get("step"), int):
        return f"step {step}"
    return f"{counted(found['step'], 'report')} with a checkpoint"


def report_text(folder: Folder) -> str:
    """A script's newest report; empty before the first."""
    newest = next(read_backwards(folder, "reports.jsonl"), None)
    if newest is None or not (found := scalars_of(newest)):
        return ""
    return f"newest report: {', '.join(f'{name} {value}' for name, value in found)}"


def watch(run_dir: RunDir, cluster: Cluster = None) -> int:
    """Show a run's progress until it ends. Ctrl-C only stops watching."""
    if cluster is not None:
        return on_cluster(cluster, "watch", run_dir)
    folder = open_run(run_dir, "watch")
    progress = Progress(Console())
    try:
        past = follow(run_dir, folder, progress)
    except KeyboardInterrupt:
        progress.close()
        print(f"no longer watching; the run is left alone: `elastic watch {run_dir}`")
        return 0
    finally:
        progress.close()
    if past.result is None:
        return refuse(f"{run_dir}: {said_of(past)}", status=FAILED)
    check_result(past.result, f"{run_dir}/result.json")
    print_outcome(past.result, run_dir, past.config.get("steps"))
    return 0 if past.result["outcome"] == "succeeded" else FAILED


def follow(run_dir: str, folder: Folder, progress: Progress) -> PastRun:
    """The run, once it has ended or nobody comes any more who could end it; a store that is away
    says neither."""
    every_s = WATCH_EVERY_S if folder.local else LOOK_REMOTE_EVERY_S
    absence = Absence(progress.tell)
    while True:
        progress(run_dir)
        try:
            past = read_past_run(folder)
        except OSError as error:
            progress.tell_trouble(error)
        else:
            if past is not None and past.is_over:
                progress(run_dir)
                return past
            if past is not None:
                absence.look(past)
        time.sleep(every_s)
