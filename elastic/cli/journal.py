"""`elastic replay | story`: a run's journal, decided again, and told of one worker.

What the decisions are is elastic/control's.
"""

import contextlib
import sys
from collections.abc import Generator
from typing import Annotated, Any

import typer

from elastic.cli.absence import NO_FOLDER
from elastic.cli.progress import decision_line, is_told
from elastic.control.replay import JOURNAL_TYPES, Entry, Started
from elastic.control.replay import replay as replay_journal
from elastic.control.story import story as story_of
from elastic.protocol.encoding import decode
from elastic.protocol.errors import WrongInput, in_words
from elastic.protocol.membership import worker_name
from elastic.store.files import Folder, open_folder, read_json
from elastic.store.journal import read_lines
from elastic.store.remote import shown_uri

FAILED = 1
RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="<storage>/<name>, a folder or a URI.")
]


def replay(run_dir: RunDir) -> int:
    """Decide everything again from the journal; exit status 1 if a decision differs."""
    entries = entries_in(run_dir)
    for text in told_lines(run_dir, entries):
        print(text)
    mismatches = replay_entries(run_dir, [line["entry"] for line in entries])
    for mismatch in mismatches:
        print(f"elastic: {mismatch}", file=sys.stderr)
    verdict = f"{len(mismatches)} differ" if mismatches else "every decision is the same again"
    print(f"{len(entries)} journal entries replayed: {verdict}")
    return FAILED if mismatches else 0


def replay_entries(run_dir: str, encoded: list[Any]) -> list[str]:
    """What would be decided otherwise now."""
    with followed(run_dir):
        parts = parts_of(encoded)
        return [str(mismatch) for part in parts for mismatch in replay_journal(part)]


def parts_of(encoded: list[Any]) -> list[list[Started | Entry]]:
    """A journal has one part per start of its run."""
    parts: list[list[Started | Entry]] = []
    for entry in encoded:
        value = decode(entry, JOURNAL_TYPES)
        if isinstance(value, Started) or not parts:
            parts.append([])
        parts[-1].append(value)
    return parts


@contextlib.contextmanager
def followed(run_dir: str) -> Generator[None]:
    """WrongInput for a journal that cannot be: a decision takes the types of its event's fields for
    granted."""
    try:
        yield
    except (OSError, WrongInput):
        raise
    except Exception as error:
        what = in_words(error) if not isinstance(error, ValueError) else str(error)
        raise WrongInput(f"{run_dir}: the journal cannot be replayed: {what}") from error


def told_lines(run_dir: str, entries: list[dict[str, Any]]) -> list[str]:
    """The decisions that have a reason, for a person."""
    try:
        told = [line for line in entries if is_told(line)]
        return [f"{x['at'] - entries[0]['at']:10.3f} s  {decision_line(x)}" for x in told]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"a decision is damaged: {in_words(error)}"
        raise WrongInput(f"{run_dir}: the journal cannot be replayed: {what}") from error


def story(
    run_dir: RunDir,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name, as w3.")],
) -> int:
    """All that happened to one worker: when, in which generation, at which step, and why."""
    number = worker.removeprefix("w")
    if not number.isdigit():
        raise WrongInput(f"{worker!r} is no worker: give its name, as w3")
    entries = entries_in(run_dir)
    with followed(run_dir):
        began = float(entries[0]["at"])
        journal = [value for part in parts_of([e["entry"] for e in entries]) for value in part]
        told = list(story_of(journal, int(number)))
    if not told:
        raise WrongInput(f"{run_dir}: there was no worker {worker_name(int(number))} in this run")
    for each in told:
        reason = f'  reason="{each.reason}"' if each.reason else ""
        print(
            f"{each.at - began:10.3f} s  generation {each.generation}  step {each.step}  "
            f"{worker_name(int(number))} {each.what}{reason}"
        )
    return 0


def entries_in(run_dir: str) -> list[dict[str, Any]]:
    """Lines of the journal that are decisions. WrongInput if there are none."""
    lines = read_lines(open_run(run_dir), "journal.jsonl")
    if not (entries := [line for line in lines if "entry" in line]):
        raise WrongInput(f"{run_dir} has no decision in its journal yet: nothing to replay")
    return entries


def open_run(run_dir: str, command: str = "") -> Folder:
    """WrongInput if this is no run directory. command: that knows submitted jobs, too."""
    folder = open_folder(run_dir)
    if not folder.exists("config.json"):
        refusal = no_run(run_dir, folder)
        if command and not folder.is_there:
            hint = f"if it is submitted, `elastic {command} JOB --cluster ADDRESS` knows more"
            raise WrongInput(f"{refusal}; {hint}")
        raise refusal
    return folder


def config_of(folder: Folder, run_dir: str) -> dict[str, Any]:
    """WrongInput if this is no run directory."""
    config = read_json(folder, "config.json")
    if config is None:
        raise no_run(run_dir, folder)
    return config


def no_run(run_dir: str, folder: Folder) -> WrongInput:
    why = "it has no config.json" if folder.is_there else NO_FOLDER
    return WrongInput(f"{shown_uri(run_dir)} is no run directory: {why}")
