"""`chaos.jsonl` in the run directory: one line for each thing that was done to the run.

Written whole each time, so that it works where a filesystem cannot append.
"""

from dataclasses import asdict, dataclass
from typing import Any

from elastic.store.files import Folder, Kinds, encode
from elastic.store.journal import read_records

CHAOS = "chaos.jsonl"
KINDS: Kinds = {
    **dict.fromkeys(("strike", "what", "whom", "phase"), str),
    **{"at": float, "step": int, "generation": int, "scenario": str, "note": str},
    **{"worker": str | None, "rank": int | None, "for_s": float | int | None},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """One strike on one process; `at` is Unix time, just before the signal went out."""

    strike: str
    """Position of the fault in its scenario, and of the strike in the fault: "2.1"."""
    what: str
    whom: str
    """A file, a folder or the room that was left, where no process was hit."""
    at: float
    step: int
    """Committed steps by then."""
    generation: int
    phase: str
    worker: str | None = None
    """None: not a worker."""
    rank: int | None = None
    node_ip: str | None = None
    pid: int | None = None
    scenario: str = ""
    note: str = ""
    """Why nothing happened; empty: it did."""
    for_s: float | None = None
    """How long it lasted: a stop, a slow process, a lost link or a full disk; None: for good, or it
    was a moment's."""


def write_done(folder: Folder, done: list[Done]) -> None:
    lines = [encode(asdict(d)) + b"\n" for d in done]
    folder.write(CHAOS, b"".join(lines), is_durable=False)


def read_done(folder: Folder) -> list[Done]:
    """Everything that was done to the run so far; empty without a file."""
    return [Done(**line) for line in map(known, read_records(folder, CHAOS, KINDS))]


def known(line: dict[str, Any]) -> dict[str, Any]:
    """Without fields of other versions."""
    return {key: value for key, value in line.items() if key in Done.__dataclass_fields__}
