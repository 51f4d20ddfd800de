"""Offsets in files of one line per step: `metrics.jsonl`, `samples.jsonl`, what was moved aside."""

from pathlib import Path

from elastic.protocol.errors import WrongInput
from elastic.store.journal import as_object, lines_backwards


def last_step(path: Path) -> int:
    return next((step_of(path, line) for _, line in lines_backwards(path)), 0)


def end_of_step(path: Path, step: int) -> int:
    """The offset where the lines after `step` begin."""
    end = path.stat().st_size
    for start, line in lines_backwards(path):
        if step_of(path, line) <= step:
            return end
        end = start
    return 0


def end_without_moved(metrics: Path, moved: Path) -> int:
    """The offset in `metrics` from which all lines are among the `moved` ones, in their order."""
    end = metrics.stat().st_size
    kept = lines_backwards(metrics)
    given_up = (line for _, line in lines_backwards(moved))
    start, last = next(kept, (end, b""))
    if last not in given_up:  # which it has been, up to the same line
        return end
    for before, line in kept:
        if line != next(given_up, b""):
            return start
        start = before
    return start


def step_of(path: Path, line: bytes) -> int:
    """WrongInput if it is none of ours, which nobody may go on from."""
    step = (as_object(line) or {}).get("step")
    if not isinstance(step, int):
        raise WrongInput(f"{path} has a damaged line: {line[:60]!r}; move the file away")
    return step
