"""`elastic track`: the steps of a run, as they are committed, to MLflow or Weights & Biases."""

import sys
import time
from typing import Annotated

import typer

from elastic.cli.journal import RunDir, config_of, open_run
from elastic.driver.resume import read_past_run
from elastic.observe.trackers import TRACKERS, Tracker, key_of
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, first_line
from elastic.store.journal import LineTail
from elastic.store.remote import shown_uri

FAILED = 1
LOOK_EVERY_S, LOOK_REMOTE_EVERY_S = 1.0, 5.0
LINES_AT_ONCE = 10_000


def track(
    run_dir: RunDir,
    tracker: Annotated[str, typer.Argument(metavar="TRACKER", help="mlflow or wandb.")],
    project: Annotated[
        str, typer.Option(help="MLflow's experiment, or the project of Weights & Biases.")
    ] = "elastic",
) -> int:
    """Send a run's steps to a tracker until the run ends; also those of one that has ended.

    The same command again goes on where it was ended. No step is sent twice.
    """
    if tracker not in TRACKERS:
        raise WrongInput(f"{tracker!r} is no tracker: choose from {', '.join(TRACKERS)}")
    folder = open_run(run_dir)
    config = config_of(folder, run_dir)
    place = str(folder) if folder.local else run_dir
    try:
        made = TRACKERS[tracker](project, key_of(place), folder.name, config)
    except (WrongInput, OSError):
        raise
    except Exception as error:  # whatever the client's server has against it
        raise WrongInput(f"{tracker} does not take the run: {first_line(error)}") from error
    print(f"{shown_uri(run_dir)} goes to {tracker}, from step {made.last_step + 1} on", flush=True)
    try:
        outcome = follow(folder, made)
    except KeyboardInterrupt:
        made.close("")
        print(f"step {made.last_step} was the last one; the same command again goes on")
        return 0
    except OSError:
        raise
    except Exception as error:
        print(
            f"elastic: {tracker} took step {made.last_step} last: {first_line(error)}",
            file=sys.stderr,
        )
        return FAILED
    made.close(outcome)
    print(f"{outcome or 'its end is not on record'}: {made.last_step} steps are in {tracker}")
    return 0


def follow(folder: Folder, tracker: Tracker) -> str:
    """Feed it until nobody comes who could end the run; the outcome, empty if there is none."""
    tail = LineTail(folder, "metrics.jsonl")
    every_s = LOOK_EVERY_S if folder.local else LOOK_REMOTE_EVERY_S
    while True:
        past = read_past_run(folder)  # before the lines: no step is committed after the end
        feed(tracker, tail)
        if past is not None and past.is_over:
            return past.result["outcome"] if past.result else ""
        time.sleep(every_s)


def feed(tracker: Tracker, tail: LineTail) -> None:
    """What is new. Steps that a run does again, behind a checkpoint, are in the tracker already."""
    last = tracker.last_step
    lines = [line for line in tail.poll() if isinstance(line.get("step"), int)]
    new = [line for line in lines if line["step"] > last]
    for start in range(0, len(new), LINES_AT_ONCE):
        tracker.log(new[start : start + LINES_AT_ONCE])
