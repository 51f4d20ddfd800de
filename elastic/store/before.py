"""`Before`: what a run directory held before a run began to write it, to be put back if nothing
comes of that run.

Who opens the run directory is run_directory.py's, when nothing comes of a run the recorder's.
"""

from dataclasses import dataclass

from elastic.store.files import Folder

REWRITTEN = ("config.json", "status.json", "result.json")
"""What a run replaces when it begins."""


@dataclass(frozen=True)
class Before:
    """Names of everything in the folder, and the content of what is replaced."""

    folder: Folder
    exists: bool
    names: frozenset[str]
    contents: dict[str, bytes]

    def put_back(self) -> None:
        """Nobody writes the run any more. Lines that were appended to older files stay."""
        for name in self.folder.names():
            if name not in self.names:
                self.folder.delete(name)
        for name in self.folder.folders():
            if name not in self.names:
                self.folder.at(name).delete_all()
        for name, content in self.contents.items():
            self.folder.write(name, content)
        if not self.exists and not self.folder.names() and not self.folder.folders():
            self.folder.delete_all()


def look_at(folder: Folder) -> Before:
    """OSError if the storage is away."""
    files = folder.names()
    contents = {name: folder.read(name) for name in REWRITTEN if name in files}
    exists = folder.parent.exists(folder.name)
    return Before(folder, exists, frozenset((*files, *folder.folders())), contents)
