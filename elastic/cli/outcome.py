"""The end of a run, in a few lines for a person."""

import sys
import traceback
from typing import Any

from elastic.protocol.errors import UserError, WrongInput
from elastic.store.remote import shown_uri


def print_failure(failure: BaseException) -> None:
    """The reason, and the user's own traceback where the user's code raised."""
    cause = failure.__cause__
    if isinstance(cause, UserError):
        print(cause.traceback_text.rstrip(), file=sys.stderr)
    elif cause is not None and not isinstance(cause, WrongInput):  # which the reason tells
        traceback.print_exception(cause)
    print(f"elastic: the run failed: {failure}", file=sys.stderr)


def print_outcome(result: dict[str, Any], run_directory: str, steps: int | None) -> None:
    """A few lines for a person."""
    run_directory = shown_uri(run_directory)
    if result["outcome"] == "detached":
        print(f"detached; see `elastic watch {run_directory}`, `elastic stop {run_directory}`")
        return
    of_steps = "" if steps is None else f" of {steps}"
    loss = "-" if result["loss"] is None else f"{result['loss']:.4f}"
    recoveries: list[dict[str, Any]] = result["recoveries"]
    print(f"{result['outcome']}: {result['steps']}{of_steps} steps, loss {loss}")
    print(f"  weights_sha256  {result['weights_sha256'] or '-'}")
    print(
        f"  since its last start: {result['generations']} generations, {len(recoveries)} "
        f"recoveries, {result['lost_steps']} lost steps, goodput {percent(result['goodput'])}"
    )
    for r in recoveries:
        phases = ("detect", "fence", "waiting", "form", "state", "first_step", "total")
        times = " ".join(
            f"{phase} {1000 * r[f'{phase}_s']:.0f} ms" for phase in phases if f"{phase}_s" in r
        )
        print(f"  recovery from {r['cause']}: {times}")
    if run_directory:
        print(f"  run directory   {run_directory}")


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"
