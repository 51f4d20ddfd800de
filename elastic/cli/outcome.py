"""The end of a run, in a few lines for a person."""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

from elastic.cli.text import lost_text, number_text, percent, printable
from elastic.protocol.errors import UserError, WrongInput
from elastic.protocol.membership import counted
from elastic.store.remote import shown_uri

WRONG_INPUT = 2
LEVELS = {0: "restart in place", 1: "commit in place", 2: "a framework's step"}
ROOT = re.escape(str(Path(__file__).resolve().parents[2]))


FRAME = re.compile(r'  File "([^"]+)", line \d+')
OURS = re.compile(rf"(?:site-packages|^{ROOT})/(?:elastic|workers)/(?!workloads/)")
SHIPPED = re.compile(r"/[^\s\"]*/_ray_pkg_\w+(?=/)")
"""The folder of TARGET as Ray unpacks it on a node."""


def print_failure(failure: BaseException, folder: Path | None = None) -> None:
    """The reason, and before it the user's own traceback where the user's code raised.

    folder: TARGET's, by which frames of its copies on nodes are shown.
    """
    cause = failure.__cause__
    reason, _, text = str(failure).partition("\n")
    if isinstance(cause, UserError):
        text = cause.traceback_text
    elif cause is not None and not text and not isinstance(cause, WrongInput):  # the reason tells
        text = "".join(traceback.format_exception(cause))
    if lines := without_repeat(of_user(text, folder), reason):
        print("\n".join(lines), file=sys.stderr)
    print(f"elastic: the run failed: {reason}", file=sys.stderr)


def of_user(text: str, folder: Path | None) -> list[str]:
    """The lines of a traceback without our own frames; none if it has no others: the reason tells
    what we refuse, and the worker's log has all of it."""
    kept: list[str] = []
    is_kept, has_ours, has_others = True, False, False
    for line in text.rstrip().splitlines():
        if frame := FRAME.match(line):
            is_kept = OURS.search(frame[1]) is None
            has_others, has_ours = has_others or is_kept, has_ours or not is_kept
        elif not line.startswith("    "):
            is_kept = True
        if is_kept:
            kept.append(line)
    lines = kept if has_others or not has_ours else []
    return lines if folder is None else [SHIPPED.sub(str(folder), line) for line in lines]


def without_repeat(lines: list[str], reason: str) -> list[str]:
    """Without the exception, where the reason ends with it."""
    return lines[:-1] if lines and reason.endswith(lines[-1]) else lines


def print_outcome(result: dict[str, Any], run_directory: str, steps: int | None) -> None:
    """A few lines for a person."""
    run_directory = shown_uri(run_directory)
    if result["outcome"] == "detached":
        print(f"detached; see `elastic watch {run_directory}`, `elastic stop {run_directory}`")
        return
    recoveries: list[dict[str, Any]] = result["recoveries"]
    print(f"{result['outcome']}: {how_far(result, steps)}")
    print(f"  weights_sha256  {result['weights_sha256'] or '-'}")
    print(
        f"  since its last start: {counted(result['generations'], 'generation')}, "
        f"{'1 recovery' if len(recoveries) == 1 else f'{len(recoveries)} recoveries'}, "
        f"{lost_text(result['lost_steps'], is_script=is_of_script(result))}, "
        f"goodput {percent(result['goodput'])}"
    )
    if (level := level_line(result)) is not None:
        print(f"  {level}")
    for r in recoveries:
        phases = ("detect", "fence", "form", "state", "first_step")
        times = " + ".join(f"{p.replace('_', ' ')} {r[f'{p}_s']:.3f} s" for p in phases)
        print(f"  recovery from {r['cause']}: {r['total_s']:.3f} s = {times}")
    if run_directory:
        print(f"  run directory   {run_directory}")


def is_of_script(result: dict[str, Any]) -> bool:
    return result.get("level") is not None


def how_far(result: dict[str, Any], steps: int | None) -> str:
    """A script says itself when it is over, which is committed, too; and nobody but the script
    knows its loss."""
    if is_of_script(result):
        is_over = result["outcome"] == "succeeded"
        return f"{counted(max(result['steps'] - is_over, 0), 'report')} with a checkpoint"
    of_steps = "" if steps is None else f" of {steps}"
    loss = "-" if result["loss"] is None else number_text(result["loss"])
    return f"{result['steps']}{of_steps} steps, loss {loss}"


def level_line(found: dict[str, Any]) -> str | None:
    """Of a script's run, from its status or its result; None for a Workload's."""
    level = found.get("level")
    if level is None:
        return None
    why = f"; {reason}" if (reason := found.get("level_reason")) else ""
    return f"level {level}, {LEVELS.get(level, 'of another version')}{why}"


def refuse(message: str, *, status: int = WRONG_INPUT) -> int:
    print("elastic:", printable(" ".join(message.split("\n"))), file=sys.stderr)
    return status
