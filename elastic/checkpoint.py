"""`elastic.checkpoint.best`: a run's checkpoint by what its metrics say.

Loads neither ray nor torch. The controller's side of checkpoints is
elastic/controller/publisher.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from elastic.config import is_number
from elastic.protocol.errors import DamagedCheckpoint
from elastic.store.catalogue import Catalogue
from elastic.store.files import Folder, check_kinds, open_folder
from elastic.store.journal import read_lines, read_records

EVALUATION = "evaluation"
"""Begins the metrics that `session.evaluate` has put into the journal."""
UNNAMED = "value"
"""How an evaluation's result is called when its function returned just a number."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """A checkpoint and its metric."""

    step: int
    path: str
    """Its folder."""
    value: float
    damaged: tuple[str, ...] = ()
    """What is wrong with better ones."""


def best(
    run_dir: str, metric: str = "loss", mode: Literal["min", "max"] = "min", *, verify: bool = True
) -> BestCheckpoint:
    """The good checkpoint of a run at whose step the metric is best, the newest of equals.

    metric: a field of metrics.jsonl, a name given to `session.log`, or `evaluation/NAME`, what
    `session.evaluate` gave at that step (`evaluation`: its only number). verify: read every byte of
    the checkpoint first; a damaged one is passed over. ValueError if there is none, or no metric at
    the step of any.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
    folder = open_folder(run_dir)
    catalogue = Catalogue(folder.at("checkpoints"))
    steps = catalogue.steps()
    if not steps:
        raise ValueError(f"{run_dir} has no published checkpoint")
    values = metric_by_step(folder, metric)
    if not values:
        raise ValueError(
            f"{run_dir} has no metric {metric!r}; it has {', '.join(names_in(folder))}"
        )
    ranked = sorted(
        (s for s in steps if s in values),
        key=lambda s: (values[s] if mode == "min" else -values[s], -s),
    )
    if not ranked:
        raise ValueError(f"{run_dir} has no {metric!r} at any of its checkpoints' steps, {steps}")
    damaged: list[str] = []
    for step in ranked:
        try:
            check(catalogue, step, verify)
        except DamagedCheckpoint as error:
            damaged.append(str(error))
            continue
        return BestCheckpoint(step, str(catalogue.of_step(step)), values[step], tuple(damaged))
    raise ValueError(f"all checkpoints with {metric!r} are damaged, the best: {damaged[0]}")


def check(catalogue: Catalogue, step: int, verify: bool) -> None:
    """Raises DamagedCheckpoint."""
    if verify:
        for _ in catalogue.verify(step):
            pass
    else:
        catalogue.manifest(step)


def metric_by_step(folder: Folder, metric: str) -> dict[int, float]:
    """Step -> value, finite ones only; of several evaluations at a step the last."""
    is_evaluated = metric.split("/")[0] == EVALUATION
    lines = evaluations(folder) if is_evaluated else recorded(folder)
    name = metric.partition("/")[2] or UNNAMED if is_evaluated else metric
    return {step: v for step, values in lines if (v := as_number(values.get(name))) is not None}


def recorded(folder: Folder) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, fields and what was logged); a field's name goes before a logged one."""
    for line in read_records(folder, "metrics.jsonl", {"step": int, "user": dict}):
        yield line["step"], {**line["user"], **line}


def evaluations(folder: Folder) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in read_lines(folder, "journal.jsonl"):
        if EVALUATION in line:
            check_kinds(line, {EVALUATION: dict}, f"{folder}/journal.jsonl")
            evaluated: dict[str, Any] = line[EVALUATION]
            check_kinds(evaluated, {"step": int, "values": dict}, f"{folder}/journal.jsonl")
            yield evaluated["step"], evaluated["values"]


def names_in(folder: Folder) -> list[str]:
    """Every metric of the run."""
    plain = {n for _, values in recorded(folder) for n, v in values.items() if is_number(v)}
    evaluated = {n for _, values in evaluations(folder) for n in values}
    found = sorted(plain) + [f"{EVALUATION}/{n}" for n in sorted(evaluated)]
    return found or ["none yet"]


def as_number(value: object) -> float | None:
    try:
        number = float(cast(float, value)) if is_number(value) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
