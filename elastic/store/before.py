"""`Before`: what a run directory held before a run began to write it, to be put back if nothing
comes of that run.

Who opens and closes the run directory is run_directory.py's, when nothing comes of a run the
recorder's.
"""

from dataclasses import dataclass

from elastic.store.files import Folder
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
        for name, content in self.contents.items():
            self.folder.write(name, content)


def look_at(folder: Folder) -> Before:
    """OSError if the storage is away."""
    files = folder.names()
    contents = {name: folder.read(name) for name in REWRITTEN if name in files}
    exists = folder.parent.exists(folder.name)
    return Before(folder, exists, frozenset((*files, *folder.folders())), contents)
