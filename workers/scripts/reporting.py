"""How the ranks of a script's call report together: who brings files, and when a report counts.

Where the files go and what is read of them later is reports.py's.
"""

from collections.abc import Callable, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from elastic.protocol.messages.to_controller import ScriptLevel
from workers.scripts.reports import UNTRAINED, File, Reports, Trained, new_name, paths_in
from workers.scripts.values import plain

UNSAID = ScriptLevel(0, 0, "")


@dataclass(slots=True)
class Told:
    """What a call of the script has reported; all ranks say the same."""

    num_reports: int = 0
    newest: str | None = None
    """The checkpoint that counts, by its name."""
    level: ScriptLevel = UNSAID
    """At which it runs, as it was said last."""
    trained: Trained = UNTRAINED
    """Behind which the call has begun."""
    metrics_of_ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of the newest report, where they are kept."""
    brought_by: frozenset[int] = frozenset()
    """Members who have brought the newest checkpoint of this call."""
    num_without: int = 0
    """Reports since then."""
    most_without: int = 0
    """In a row, so far."""

    def line(self, metrics: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
        """Of the newest report, for reports.jsonl."""
        line = {"report": self.num_reports, "metrics": metrics, "checkpoint": checkpoint}
        if self.metrics_of_ranks:
            line["metrics_of_ranks"] = self.metrics_of_ranks
        return line

    def count(self, bringing: Set[int], members: Set[int]) -> bool:
        """A report, by who brings files for it and who is there. False: a checkpoint would be due,
        but all are lost who have brought one before."""
        if bringing:
            self.brought_by, self.num_without = frozenset(bringing), 0
            return True
        self.num_without += 1
        if self.brought_by and not self.brought_by & members:
            return self.num_without <= self.most_without
        self.most_without = max(self.most_without, self.num_without)
        return True


class Ranks(Protocol):
    """Of one call of the script, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Among those that are there now."""
        ...

    @property
    def member(self) -> int:
        """The rank that it had when the call began."""
        ...

    @property
    def size(self) -> int: ...
    @property
    def trained(self) -> Trained: ...

    generation: int
    """Today's."""

    def gather(self, value: Any) -> dict[int, Any]:
        """The JSON values of all, by the ranks that they had when the call began, in the order of
        today's. A collective."""
        ...

    def end_step(self, publish: Callable[[], None]) -> None:
        """All ranks are here: what the lowest one publishes counts. StepCancelled if not, and where
        newcomers are in the next step."""
        ...

    def call_again(self, why: str) -> NoReturn:
        """The script. Raises StepCancelled."""
        ...


class Reporting:
    """Of one call of the script, on one rank."""

    def __init__(self, ranks: Ranks, reports: Reports, *, keeps_all_metrics: bool) -> None:
        """keeps_all_metrics: those of every rank, and not of the lowest one alone."""
        self._ranks, self._reports, self._keeps_all = ranks, reports, keeps_all_metrics
        self.told = Told()

    def report(self, metrics: dict[str, Any], source: Path | None, name: str | None) -> str | None:
        """Returns once the checkpoint is published, by its name; None: no rank has brought one."""
        self.told.num_reports += 1
        metrics = plain(metrics)
        said = self._ranks.gather([source is not None, metrics if self._keeps_all else None])
        if self._keeps_all:
            self.told.metrics_of_ranks = [metrics for _, metrics in said.values()]
        who = {member for member, (brings, _) in said.items() if brings}
        if not self.told.count(who, said.keys()):
            self._ranks.call_again("who has brought the checkpoints is lost, and no rank does now")
        if not who:
            if self._ranks.rank == 0:
                self._log(metrics, None)
            return None
        name, files = self._bring(source, name, who)
        self.told.newest = name

        def publish() -> None:
            names = [entry["checkpoint_dir_name"] for entry in self._reports.entries()]
            if self._ranks.rank == 0 and name not in names:
                self._reports.publish(name, files, metrics, self._ranks.trained)
                self._log(metrics, name)
                self._reports.flush_log()

        self._ranks.end_step(publish)
        return name

    def _bring(
        self, source: Path | None, name: str | None, who: set[int]
    ) -> tuple[str, list[File]]:
        """The files of all who bring some are there, under the name that the lowest rank gives."""
        ranks = self._ranks
        paths = paths_in(source) if source is not None else []
        while True:
            if ranks.rank == 0:
                name = name or new_name()
                self._reports.clear(name)
            named = ranks.gather([name, paths])
            name = next((given for given, _ in named.values() if given is not None), None)
            files: list[File] = []
            if source is not None and name is not None:
                files = self._reports.store(source, name, brought_by(ranks.member, named))
            gathered = ranks.gather([asdict(file) for file in files])
            files = [File(**f) for of_member in gathered.values() for f in of_member]
            wanted = {path for _, of_member in named.values() for path in of_member}
            if who <= named.keys() and wanted <= {file.path for file in files} and name is not None:
                return name, files
            here = {path for m in gathered for path in (named[m][1] if m in named else ())}
            if not (who <= named.keys() and wanted <= here):
                ranks.call_again("a report lacks the files of a lost rank")

    def _log(self, metrics: dict[str, Any], name: str | None) -> None:
        of_group = {"generation": self._ranks.generation, "world_size": self._ranks.size}
        self._reports.log(self.told.line(metrics, name) | of_group)


def brought_by(member: int, named: dict[int, Any]) -> list[str]:
    """Of the files that each has, those that this one brings: what several have, the lowest rank
    does."""
    brought: list[str] = []
    for other, (_, paths) in named.items():
        if other == member:
            return [path for path in paths if path not in brought]
        brought += paths
    return []
