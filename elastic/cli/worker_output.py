"""What the workers of a script's run print, shown where the run was started.

The engine's own lines stay in the logs; they are shown by `elastic logs`.
"""

import re

from elastic.cli.text import printable
from elastic.store.files import Folder, reach_folder
from elastic.store.journal import appended, grown

FOLDER, ENDING = "logs", ".log"
OURS = re.compile(r"(INFO|WARNING|ERROR):(elastic|workers)\.")


class WorkerOutput:
    """Called often with the run directory. In a bucket logs come every few seconds."""

    def __init__(self, run_directory: str) -> None:
        """What an earlier launch of the run has left there is not shown."""
        sizes = reach_folder(run_directory).at(FOLDER).sizes()
        self._shown = {n: grown(sizes, n) for n in sizes if n.endswith(ENDING)}
        """Bytes of each log."""

    def __call__(self, run_directory: str) -> None:
        folder = reach_folder(run_directory).at(FOLDER)
        for name in folder.names():
            if name.endswith(ENDING):
                self._show(folder, name)

    def _show(self, folder: Folder, name: str) -> None:
        """Whole lines only."""
        offset = self._shown.get(name, 0)
        content = appended(folder, name, offset)
        whole = content[: content.rfind(b"\n") + 1]
        self._shown[name] = offset + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if not OURS.match(line):
                print(printable(line), flush=True)
