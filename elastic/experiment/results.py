"""What came of each run of an experiment: one line of `results.csv`, which all else is made from.

Where the numbers come from is elastic/chaos/report.py's.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from elastic.experiment.sweep import Condition, Point
from elastic.protocol.errors import WrongInput
from elastic.store.files import first_line, write_local

FILE = "results.csv"
MEASURED = (
    "outcome",
    "steps",
    "lost_steps",
    "wall_s",
    "goodput_time",
    "goodput_capacity",
    "longest_gap_s",
    "faults",
    "recovery_p50_s",
    "recovery_max_s",
    "recoveries_s",
    "weights_sha256",
    "run",
)
"""Columns behind scenario, seed and the options that vary. recoveries_s: of each, from the last
sign of life of who was lost to the next step, with a blank between them."""
VARIED = "vary."
"""Begins the columns of options: some are called as what is measured."""
Row = dict[str, str]


def row_of(point: Point, report: Mapping[str, Any], result: Mapping[str, Any], run: str) -> Row:
    """report: of elastic/chaos/report.py. result: what result.json has, perhaps nothing. run: the
    name of its directory."""
    recoveries = [float(recovery["total_s"]) for recovery in report["recoveries"]]
    measured: dict[str, object] = {
        "outcome": result.get("outcome", report["outcome"]),
        "steps": report["steps"],
        "lost_steps": report["lost_steps"],
        "wall_s": rounded(report["wall_s"]),
        "goodput_time": rounded(report["goodput"]["time"]),
        "goodput_capacity": rounded(report["goodput"]["capacity"]),
        "longest_gap_s": rounded(report["longest_gap_s"]),
        "faults": sum(not fault["note"] for fault in report["faults"]),
        "recovery_p50_s": rounded(median(recoveries)) if recoveries else "",
        "recovery_max_s": rounded(max(recoveries)) if recoveries else "",
        "recoveries_s": " ".join(str(rounded(seconds)) for seconds in recoveries),
        "weights_sha256": result.get("weights_sha256") or "",
        "run": run,
    }
    return {**key_of(point), **{name: str(value) for name, value in measured.items()}}


def nothing_of(point: Point, outcome: str, run: str) -> Row:
    """Of a run that has nothing to report."""
    return {**key_of(point), **dict.fromkeys(MEASURED, ""), "outcome": outcome, "run": run}


def key_of(point: Point) -> Row:
    """The columns that say which point a line is of."""
    options = {f"{VARIED}{key}": str(value) for key, value in point.condition.options}
    return {"scenario": point.condition.scenario, "seed": str(point.seed), **options}


def rounded(seconds: float) -> float:
    return round(float(seconds), 4)


def read_results(place: Path, columns: Sequence[str]) -> list[Row]:
    """Those that are there already. columns: of this sweep. WrongInput if they are of another."""
    path = place / FILE
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"{path} cannot be read: {first_line(error)}") from error
    try:
        found = list(csv.DictReader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise WrongInput(f"{path} is damaged: {error}") from error
    if any(list(row) != [*columns] or None in row.values() for row in found):
        raise WrongInput(
            f"{path} has other columns than this sweep: it is of another one, or damaged; "
            "give the sweep another place"
        )
    return found


def write_results(place: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_local(place / FILE, text.getvalue().encode(), is_durable=True)


def columns_of(conditions: Sequence[Condition]) -> list[str]:
    return ["scenario", "seed", *(f"{VARIED}{key}" for key, _ in conditions[0].options), *MEASURED]
