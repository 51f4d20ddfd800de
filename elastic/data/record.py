"""What the feed leaves in the run directory: its plan, and what each window gave.

`data.json` is written whole by the feed alone. Losing it costs reading again, never a row; what a
window gives is a function of the plan, so it holds for every later start of the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic.data.plan import Plan, differences, told
from elastic.data.stream import WindowKey
from elastic.protocol.errors import WrongInput
from elastic.store.files import Folder, open_folder, read_json, write_json

NAME = "data.json"


@dataclass
class FeedRecord:
    """The record of one run, in memory; `write` publishes it."""

    plan: Plan
    folder: Folder
    counts: dict[WindowKey, int] = field(default_factory=dict[WindowKey, int])
    skipped: dict[WindowKey, tuple[int, ...]] = field(
        default_factory=dict[WindowKey, tuple[int, ...]]
    )
    """Units that were left out of a window when it was read first."""
    is_written: bool = False

    def add(self, key: WindowKey, count: int, skipped: Iterable[int]) -> bool:
        """A window has been read; True if that is news (what was planned never is)."""
        if key in self.counts or self.plan.source.has_planned_counts:
            return False
        self.counts[key] = count
        if units := tuple(skipped):
            self.skipped[key] = units
        self.is_written = False
        return True

    def write(self) -> None:
        """Publish what is news, once there is a run directory."""
        if self.is_written or not self.folder.exists("config.json"):
            return
        write_json(self.folder, NAME, self.to_json())
        self.is_written = True

    def to_json(self) -> dict[str, Any]:
        return {
            "plan_sha256": self.plan.hash,
            "plan": self.plan.to_json(),
            "counts": [[k.epoch, k.window, n] for k, n in sorted(self.counts.items())],
            "skipped": [[k.epoch, k.window, *u] for k, u in sorted(self.skipped.items())],
        }


def open_record(plan: Plan, place: str) -> FeedRecord:
    """The record in the run directory `place`, new if there is none.

    WrongInput if the run began with another plan: says what changed.
    """
    folder = open_folder(place)
    record = FeedRecord(plan, folder)
    found = read_json(folder, NAME)
    if found is None:
        return record
    if found["plan_sha256"] != plan.hash:
        changes = told(differences(found["plan"], plan.to_json()))
        raise WrongInput(
            f"the data changed since the run {place} began: {changes}. Bring it back as it was, "
            "or use another --name"
        )
    record.counts = {WindowKey(epoch, window): n for epoch, window, n in found["counts"]}
    record.skipped = {WindowKey(e, w): tuple(units) for e, w, *units in found["skipped"]}
    record.is_written = True
    return record
