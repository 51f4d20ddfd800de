"""What storage refused during a run, for its status and for the warning at its end.

Whether a run may go on after it is decided elsewhere (control/transition.py, supervisor.py).
"""


class Unpublished(OSError):
    """A checkpoint that all ranks have written, but whose manifest could not be."""


class StorageTrouble:
    """Failed saves and failed writes, and their causes."""

    def __init__(self) -> None:
        self._failed: dict[int, str] = {}  # step -> cause, in the order of their failure
        self._saved: set[int] = set()
        self._files = ""  # why a file of the run directory could not be written, the last time
        self._upload = ""
        self._is_last_save_lost = False
        self._damaged: dict[int, str] = {}  # step -> what is wrong with its checkpoint
        self._missing: list[tuple[int, int]] = []  # first, last step without a line

    def hear_damaged(self, step: int, what: str) -> None:
        """A checkpoint that was found damaged, and kept aside."""
        self._damaged[step] = what

    def hear_missing(self, first: int, last: int) -> None:
        """Steps whose lines are lost, though a checkpoint has their state."""
        self._missing.append((first, last))

    def hear_save(self, step: int, cause: str) -> None:
        """The save of `step` has failed; of several causes the first counts."""
        self._failed.setdefault(step, cause)
        self._is_last_save_lost = True

    def hear_published(self, step: int, cause: str = "") -> None:
        """cause: why it could not be published after all."""
        if cause:
            self.hear_save(step, cause)
            return
        self._failed.pop(step, None)
        self._saved.add(step)
        self._is_last_save_lost = False

    def hear_write(self, cause: str) -> bool:
        """A file of the run directory. True if it is news."""
        is_news, self._files = cause != self._files, cause
        return is_news

    def hear_upload(self, cause: str) -> bool:
        """Empty: it works. True if it is news."""
        is_news, self._upload = cause != self._upload, cause
        return is_news

    @property
    def now(self) -> str:
        """What is wrong at the moment, for status.json; empty if nothing is."""
        found: list[str] = []
        if self._is_last_save_lost and self._failed:
            step, cause = list(self._failed.items())[-1]
            found.append(f"the save of step {step} failed: {cause}")
        if self._upload:
            found.append(f"files wait for storage: {self._upload}")
        return "; ".join(found)

    def summary(self, committed: int | None, spool: str) -> str:
        """One line at the end of the run; empty if all is well.

        committed: step of the newest checkpoint. spool: where the files are that did not get
        through; empty if storage is local.
        """
        found = [
            f"the checkpoint of step {step} was damaged and kept aside, an earlier one used: {what}"
            for step, what in self._damaged.items()
        ]
        found += [
            f"steps {first} to {last} have no lines in metrics.jsonl and samples.jsonl: they were "
            f"not on record when the run went on from a state of step {last}"
            for first, last in self._missing
        ]
        if self._failed:
            step, cause = list(self._failed.items())[-1]
            newest = "there is no checkpoint" if committed is None else (
                f"the newest checkpoint is of step {committed}"
            )  # fmt: skip
            total = len(self._failed) + len(self._saved)
            found.append(
                f"{len(self._failed)} of {total} saves failed, the last at step {step}: {cause}; "
                f"{newest}"
            )
        if self._files or self._upload:
            where = f"; they are in {spool} on the controller's node" if spool else ""
            cause = self._upload or self._files
            found.append(f"some files of the run may be incomplete in storage: {cause}{where}")
        return "; ".join(found)
