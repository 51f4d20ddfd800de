"""Values as a person reads them in a terminal: numbers, times, names, what others have written."""

import time
from collections.abc import Mapping
from typing import Any, cast

from rich.markup import escape

from elastic.protocol.membership import counted

MOST_SCALARS = 6
"""Of a script's report: as many are shown."""


def number_text(value: float) -> str:
    """Four digits that say something, of a small loss, too."""
    return f"{value:.4f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4g}"


def name_of(worker: object) -> str:
    return f"w{worker}" if isinstance(worker, int) else str(worker)


def text_of(value: object) -> str:
    return "-" if value is None else escape(printable(str(value)))


def printable(text: str) -> str:
    """What others have written does not drive the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def scalars_of(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the first numbers of a line of reports.jsonl."""
    metrics = report.get("metrics")
    found = cast("dict[str, Any]", metrics) if isinstance(metrics, dict) else {}
    numbers = [(name, value) for name, value in found.items() if isinstance(value, int | float)]
    return [(printable(name), scalar_text(value)) for name, value in numbers[:MOST_SCALARS]]


def scalar_text(value: float) -> str:
    return str(value) if isinstance(value, int) else number_text(value)


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


def lost_text(number: int, *, is_script: bool) -> str:
    """What a script's runs commit, and may lose, are reports with a checkpoint."""
    return counted(number, "lost report" if is_script else "lost step")


def duration(seconds: float) -> str:
    """As 0:07, 12:05 or 3:00:00; days before that."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{counted(days, 'day')} {clock}" if days else clock


def clock(at: float) -> str:
    """The time of day in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(at))


def speed_text(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.3g}"
