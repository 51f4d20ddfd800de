"""Errors that cross rooms or processes. They carry fields and survive pickling.

And any exception in words, even one whose own text cannot be had.
"""


class StepCancelled(BaseException):
    """The step was given up because a peer was lost; the `with` block of the step swallows it.

    A BaseException, so that a user's `except Exception` cannot eat it.
    """


class WrongInput(Exception):
    """The user's settings, workload or data cannot work: one line, exit status 2."""


class UnfitNode(WrongInput):
    """This node cannot serve the run, others may."""


class UserError(Exception):
    """The user's code raised in another process; `traceback_text` is its own traceback."""

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message, traceback_text)
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.message}\n{self.traceback_text}"


class WorkerFailed(Exception):
    """A worker's process raised. `pickled` is the exception, for those who can import its class
    (the driver); empty if it cannot be pickled. `text` tells it to everybody else. `rank`: its own,
    None if it was in no generation yet."""

    def __init__(self, text: str, pickled: bytes, rank: int | None) -> None:
        super().__init__(text, pickled, rank)
        self.text, self.pickled, self.rank = text, pickled, rank

    def __str__(self) -> str:
        return self.text


class ControllerLost(RuntimeError):
    """The run's controller died or does not answer; the run has ended without a result."""


class PeerLost(RuntimeError):
    """A collective of ours failed or was given up; the controller decides whether it is a loss."""


class CollectiveRefused(PeerLost):
    """The backend refused what was asked of it: the same members would meet it again."""


class OutOfDeviceMemory(PeerLost):
    """The backend got no memory of its device for a collective: fewer members may need more."""


class NoAnswer(PeerLost):
    """The backend got no answer from a host, however often it has sent."""

    def __init__(self, text: str, host: str) -> None:
        super().__init__(text)
        self.host = host


class GivenUp(PeerLost):
    """The loop ends the generation of its own accord: no loss is waited for that explains it."""


class DoesNotFit(GivenUp):
    """Members are too few: a step and the state need more memory than they have."""

    def __init__(self, text: str, num_members: int) -> None:
        super().__init__(text)
        self.num_members = num_members


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is not what was written."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(place, what)
        self.place, self.what = place, what

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class BadData(Exception):
    """A file of the data, or what the workload's transform makes of it, cannot be used.

    `place` names the file and row group; `traceback_text` is the user's own, or empty.
    """

    def __init__(self, place: str, what: str, traceback_text: str = "") -> None:
        super().__init__(place, what, traceback_text)
        self.place, self.what, self.traceback_text = place, what, traceback_text

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def text_of(error: BaseException) -> str:
    """`str(error)`; a user's class may raise there."""
    try:
        return str(error)
    except BaseException as failure:  # it may be sys.exit as well
        return f"(its text cannot be had, str() of it raised {type(failure).__name__})"


def in_words(error: BaseException) -> str:
    """Its class and its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
