"""`Before`: what a run directory held before a run began to write it, to be put back if nothing
comes of that run.

Who opens and closes the run directory is run_directory.py's, when nothing comes of a run the
recorder's.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from elastic.store.files import PROBE, Folder
from elastic.store.journal import numbered

REWRITTEN = ("config.json", "status.json", "result.json")
"""What a run replaces when it begins."""
ADDED = (
    *("journal.jsonl", "metrics.jsonl", "commits.jsonl", "samples.jsonl", "anatomy.jsonl"),
    "data.json",
)
"""Files that a run makes if they are not there, or segments of them."""
RENAMED = {"commits.jsonl": "samples.jsonl"}
"""A run of an earlier version had it under another name, if it had the other file."""
LOGS = "logs"
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Before:
    """Names of everything in the folder, and the content of what is replaced."""

    folder: Folder
    exists: bool
    names: frozenset[str]
    contents: dict[str, bytes]

    def put_back(self) -> None:
        """While nobody else may write the run. Others may have put files here meanwhile, so only
        what a run makes goes. Lines that were appended to older files stay."""
        for name in (*REWRITTEN, *ADDED):  # without config.json the feed writes nothing more
            known = (name, RENAMED.get(name, name))
            if not any(n in self.names or numbered(self.names, n) for n in known):
                for each in (name, *numbered(self.folder.names(), name)):
                    self.folder.delete(each)
        if LOGS not in self.names:
            self.folder.at(LOGS).delete_all()
        self._delete_probes()
        for name, content in self.contents.items():
            self.folder.write(name, content)

    def remove_folder(self, patience_s: float = 5.0) -> None:
        """On a local disk, after `put_back`. A worker that still starts may put a probe there until
        it is ended, which is waited for; what others have put there keeps the folder."""
        assert self.folder.local is not None
        give_up_at = time.monotonic() + patience_s
        while not _is_removed(self.folder) and time.monotonic() < give_up_at:
            if any(PROBE not in name for name in (*self.folder.names(), *self.folder.folders())):
                return
            self._delete_probes()
            time.sleep(LOOK_EVERY_S)

    def _delete_probes(self) -> None:
        """Of workers (workers/health/storage.py)."""
        for name in self.folder.names():
            if PROBE in name and name not in self.names:
                with suppress(FileNotFoundError):  # it has just been deleted there
                    self.folder.delete(name)


def _is_removed(folder: Folder) -> bool:
    assert folder.local is not None
    try:
        folder.local.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def look_at(folder: Folder) -> Before:
    """OSError if the storage is away."""
    files = folder.names()
    contents = {name: folder.read(name) for name in REWRITTEN if name in files}
    exists = folder.parent.exists(folder.name)
    return Before(folder, exists, frozenset((*files, *folder.folders())), contents)
