"""`Followed`: what a script's ranks report and raise, told in the process that has started the run.

Who is told, and in which form, is elastic/ray_train.py's.
"""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from elastic.store.files import Folder, reach_folder

FAILURE = re.compile(r"failure-(.+)-(\d+)-(\d+)\.json")
"""Of one rank in one generation (workers/scripts/reports.py)."""


class ScriptRaised(RuntimeError):
    """What a rank of a script has raised, in words."""


class Followed:
    """Called often with the run directory, in any thread. In a bucket, reports without a checkpoint
    come with the next one that has one."""

    def __init__(
        self,
        run_directory: str,
        after_report: Callable[[list[dict[str, Any]], str | None], None],
        after_exception: Callable[[dict[int, Exception]], None],
    ) -> None:
        """What an earlier launch of the run has left there is not told.

        after_report: takes the metrics of each rank and the checkpoint's name.
        after_exception: takes exceptions by the ranks that raised them in one call.
        """
        from workers.scripts.reports import MANIFESTS, REPORTS

        self._lines, self._failures = REPORTS, MANIFESTS
        self._after_report, self._after_exception = after_report, after_exception
        folder = reach_folder(run_directory)
        self._offset = folder.size(REPORTS) or 0
        self._told = set(folder.at(MANIFESTS).names())
        self._lock = threading.Lock()
        self.error: Exception | None = None
        """What a function that is told has raised; after that none is told any more."""

    def __call__(self, run_directory: str) -> None:
        """OSError if the storage is away, as of which nothing is lost."""
        folder = reach_folder(run_directory)
        with self._lock:
            for report in self._new_reports(folder):
                self._tell(self._after_report, report["metrics_of_ranks"], report["checkpoint"])
            for exceptions in self._new_failures(folder.at(self._failures)):
                self._tell(self._after_exception, exceptions)

    def _tell(self, told: Callable[..., None], *what: Any) -> None:
        if self.error is None:
            try:
                told(*what)
            except Exception as error:
                self.error = error

    def _new_reports(self, folder: Folder) -> list[dict[str, Any]]:
        """Of whole lines only."""
        if not folder.exists(self._lines):
            return []
        content = folder.read_from(self._lines, self._offset)
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _new_failures(self, folder: Folder) -> list[dict[int, Exception]]:
        """By rank; those of each generation together."""
        found: defaultdict[tuple[str, int], dict[int, Exception]] = defaultdict(dict)
        for name in folder.names():
            if name not in self._told and (of := FAILURE.fullmatch(name)):
                failure = json.loads(folder.read(name))
                found[of[1], int(of[2])][failure["rank"]] = ScriptRaised(failure["error"])
                self._told.add(name)
        return [dict(sorted(found[key].items())) for key in sorted(found)]
