"""What the experiments of README.md have in common: rows with a limit, a time limit, a verdict.

`python -m tests.gpu.one.a1_forming` prints a row per number, `PASS name value (limit)`, and ends
with 0 if all pass, 1 if one fails, 2 where the machine is not enough. `--record` appends the rows
to RESULTS.md.
"""

import argparse
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.gpu import machine

RESULTS = Path(__file__).with_name("RESULTS.md")
LIMIT_MINUTES = 10.0


@dataclass(frozen=True)
class Row:
    name: str
    value: str
    limit: str
    """What must hold of the value; empty: it is only told."""
    is_good: bool

    @property
    def verdict(self) -> str:
        return ("PASS" if self.is_good else "FAIL") if self.limit else "TELL"

    def __str__(self) -> str:
        limit = f" ({self.limit})" if self.limit else ""
        return f"{self.verdict} {self.name} {self.value}{limit}"


@dataclass
class Table:
    """The rows of one experiment, printed as they come."""

    rows: list[Row] = field(default_factory=list)

    def _add(self, name: str, value: str, limit: str, is_good: bool) -> None:
        self.rows.append(Row(name, value, limit, is_good))
        print(self.rows[-1], flush=True)

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._add(name, f"{value:.4g} {unit}".strip(), f"at most {limit:g} {unit}".strip(),
                  value <= limit)  # fmt: skip

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._add(name, f"{value:.4g} {unit}".strip(), f"at least {limit:g} {unit}".strip(),
                  value >= limit)  # fmt: skip

    def holds(self, name: str, is_so: bool, found: str = "") -> None:
        self._add(name, found or ("yes" if is_so else "no"), "must hold", is_so)

    def tell(self, name: str, value: object) -> None:
        self._add(name, str(value), "", True)

    @property
    def is_good(self) -> bool:
        return bool(self.rows) and all(row.is_good for row in self.rows)


def main(
    body: Callable[[Table, argparse.Namespace], None],
    *,
    num_gpus: int = 1,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> int:
    """The exit status of one experiment's script. The title is its module's first line."""
    module = sys.modules[body.__module__]
    name = Path(str(module.__file__)).stem
    parser = argparse.ArgumentParser(description=module.__doc__)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    parser.add_argument(
        "--anywhere", action="store_true", help="also without such GPUs: tries the script, no more"
    )
    options(parser)
    arguments = parser.parse_args()
    if (why := machine.refusal(num_gpus)) and not arguments.anywhere:
        print(f"{name}: {why}", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(60 * LIMIT_MINUTES, exit=True, file=sys.__stderr__)
    table, began = Table(), time.monotonic()
    try:
        body(table, arguments)
    except Exception as error:
        traceback.print_exc()
        table.holds("ran to its end", False, f"{type(error).__name__}: {error}".splitlines()[0])
    table.tell("seconds", f"{time.monotonic() - began:.0f}")
    faulthandler.cancel_dump_traceback_later()
    if arguments.record:
        record(name, table)
    return 0 if table.is_good else 1


def record(name: str, table: Table, about: str = "") -> None:
    """One row of RESULTS.md for each of the table's, below the machine's line."""
    about = about or machine.line()
    text = RESULTS.read_text()
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [f"| {day} | {name} | {r.name} | {r.value} | {r.limit} | {r.verdict} |"
             for r in table.rows]  # fmt: skip
    if about not in text:
        head = "| day | experiment | name | value | limit | |\n|---|---|---|---|---|---|\n"
        text += f"\n{about}\n\n{head}"
    RESULTS.write_text(text + "\n".join(lines) + "\n")


# --- what several of them look at --------------------------------------------------------------
def thread_names() -> list[str]:
    """Of this process, torch's and NCCL's included."""
    found = list[str]()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # it has just ended
            found.append((task / "comm").read_text().strip())
    return found


def num_threads(timeout_s: float = 10.0) -> int:
    """Once no more of them end: those of the store in which ranks meet take a moment, and groups
    are part of cycles."""
    gc.collect()
    deadline, found = time.monotonic() + timeout_s, len(thread_names())
    while time.monotonic() < deadline:
        time.sleep(0.5)
        found, before = len(thread_names()), found
        if found >= before:
            break
    return found


def wait_for_threads(*names: str, timeout_s: float = 60.0) -> float:
    """Until no thread of Python's with one of these names is left; gives the seconds."""
    began = time.monotonic()
    while any(thread.name in names for thread in threading.enumerate()):
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"threads {names} are still there after {timeout_s:g} s")
        time.sleep(0.001)
    return time.monotonic() - began


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]
