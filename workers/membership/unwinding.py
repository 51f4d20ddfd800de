"""What a member raises through the user's code, which must not catch it: no Exceptions."""


class RunEnded(BaseException):
    """The controller ended the run; unwinds the user's loop."""


class RolledBack(BaseException):
    """The run went back to a checkpoint in the middle of the user's code outside steps; unwinds
    the user's loop, which begins again."""
